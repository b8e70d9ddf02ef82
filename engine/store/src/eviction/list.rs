//! Doubly linked lists threaded through one array indexed by object id: all moves cost the same, nothing is allocated.

use ebbtide_core::{Cost, ObjectId};
use ebbtide_mem::sum;

const NONE: u32 = u32::MAX;

/// An object's links and marks: all that a touch looks at, so kept small and apart from the costs.
#[derive(Clone, Copy)]
pub(super) struct Node {
    newer: u32,
    older: u32,
    /// Which list it is in; 0 is none.
    pub(super) list: u8,
    /// For the policy's use.
    pub(super) mark: u8,
}

const _: () = assert!(std::mem::size_of::<Node>() == 12);

const VACANT: Node = Node { newer: NONE, older: NONE, list: 0, mark: 0 };

/// Nodes by object id.
#[derive(Default)]
pub(super) struct Nodes {
    nodes: Vec<Node>,
    costs: Vec<Cost>,
}

impl Nodes {
    pub(super) fn get(&self, id: ObjectId) -> Option<&Node> {
        self.nodes.get(id.0 as usize).filter(|node| node.list != 0)
    }

    pub(super) fn get_mut(&mut self, id: ObjectId) -> Option<&mut Node> {
        self.nodes.get_mut(id.0 as usize).filter(|node| node.list != 0)
    }

    /// Asks for what is known of `id` ahead of need.
    pub(super) fn expect(&self, id: ObjectId) {
        if let Some(node) = self.nodes.get(id.0 as usize) {
            sum::expect(node);
        }
    }

    fn at(&mut self, id: u32) -> &mut Node {
        &mut self.nodes[id as usize]
    }

    fn make(&mut self, id: ObjectId, cost: Cost) -> &mut Node {
        let at = id.0 as usize;
        if at >= self.nodes.len() {
            self.nodes.resize(at + 1, VACANT);
            self.costs.resize(at + 1, Cost { bytes: 0, tag: 0 });
        }
        self.costs[at] = cost;
        &mut self.nodes[at]
    }
}

/// One list, oldest to newest.
pub(super) struct List {
    number: u8,
    newest: u32,
    oldest: u32,
    pub(super) len: usize,
    pub(super) bytes: u64,
}

impl List {
    /// An empty list; `number` tells the lists of one policy apart and is not 0.
    pub(super) fn new(number: u8) -> Self {
        List { number, newest: NONE, oldest: NONE, len: 0, bytes: 0 }
    }

    pub(super) fn push_newest(&mut self, nodes: &mut Nodes, id: ObjectId, cost: Cost) {
        let newest = self.newest;
        *nodes.make(id, cost) = Node { newer: NONE, older: newest, list: self.number, mark: 0 };
        match newest {
            NONE => self.oldest = id.0,
            _ => nodes.at(newest).newer = id.0,
        }
        self.newest = id.0;
        self.grew(cost);
    }

    pub(super) fn push_oldest(&mut self, nodes: &mut Nodes, id: ObjectId, cost: Cost) {
        let oldest = self.oldest;
        *nodes.make(id, cost) = Node { newer: oldest, older: NONE, list: self.number, mark: 0 };
        match oldest {
            NONE => self.newest = id.0,
            _ => nodes.at(oldest).older = id.0,
        }
        self.oldest = id.0;
        self.grew(cost);
    }

    /// Takes `id`, which is in this list, out of it.
    pub(super) fn unlink(&mut self, nodes: &mut Nodes, id: ObjectId) -> Cost {
        self.cut(nodes, id);
        nodes.at(id.0).list = 0;
        let cost = nodes.costs[id.0 as usize];
        self.len -= 1;
        self.bytes -= cost.bytes;
        cost
    }

    /// Makes `id`, which is in this list, its newest.
    pub(super) fn renew(&mut self, nodes: &mut Nodes, id: ObjectId) {
        if self.newest == id.0 {
            return;
        }
        self.cut(nodes, id);
        let newest = std::mem::replace(&mut self.newest, id.0);
        nodes.at(newest).newer = id.0;
        let node = nodes.at(id.0);
        (node.newer, node.older) = (NONE, newest);
    }

    fn cut(&mut self, nodes: &mut Nodes, id: ObjectId) {
        let node = *nodes.at(id.0);
        debug_assert_eq!(node.list, self.number);
        match node.newer {
            NONE => self.newest = node.older,
            newer => nodes.at(newer).older = node.older,
        }
        match node.older {
            NONE => self.oldest = node.newer,
            older => nodes.at(older).newer = node.newer,
        }
    }

    pub(super) fn oldest(&self) -> Option<ObjectId> {
        (self.oldest != NONE).then_some(ObjectId(self.oldest))
    }

    fn grew(&mut self, cost: Cost) {
        self.len += 1;
        self.bytes += cost.bytes;
    }
}
