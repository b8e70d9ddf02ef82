//! Memory that headers and footers are written from: a ring of arena buffers that the tier owns from its start, so that
//! writing never waits for memory, and the heap when the ring is busy or a header is longer than its buffers.

use std::collections::VecDeque;

use ebbtide_core::Charge;
use ebbtide_mem::{Buf, BufMut, round_up_to_page};
use parking_lot::Mutex;

pub(crate) struct HeaderPool {
    /// Frozen; one is free again when the device has dropped the slice that it was given.
    ring: Mutex<VecDeque<Buf>>,
    /// The length of each.
    room: usize,
    _charges: Vec<Charge>,
}

impl HeaderPool {
    pub(crate) fn new(buffers: Vec<(BufMut, Charge)>) -> Self {
        let room = buffers.iter().map(|(buf, _)| buf.len()).min().unwrap_or(0);
        let (buffers, charges): (Vec<_>, Vec<_>) = buffers.into_iter().unzip();
        HeaderPool {
            ring: Mutex::new(buffers.into_iter().map(BufMut::freeze).collect()),
            room,
            _charges: charges,
        }
    }

    /// A buffer with `bytes` and zeros up to a whole page.
    pub(crate) fn load(&self, bytes: &[u8]) -> Buf {
        let padded = round_up_to_page(bytes.len());
        let Some(mut buf) = self.take(padded) else {
            let mut buf = BufMut::heap(padded); // zeroed
            buf.write_at(0, bytes);
            return buf.freeze();
        };
        buf.write_at(0, bytes);
        let padding = padded - bytes.len();
        if padding > 0 {
            buf.write_at(bytes.len(), &[0; ebbtide_mem::PAGE_BYTES][..padding]);
        }
        let whole = buf.freeze();
        let slice = whole.slice(0, padded);
        self.ring.lock().push_back(whole);
        slice
    }

    fn take(&self, bytes: usize) -> Option<BufMut> {
        if bytes > self.room {
            return None;
        }
        let mut ring = self.ring.lock();
        match ring.pop_front()?.thaw() {
            Ok(buf) => Some(buf),
            Err(busy) => {
                ring.push_back(busy);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ebbtide_core::Budget;

    use super::*;

    #[test]
    fn a_buffer_is_lent_again_only_when_nobody_has_it() {
        let budget = Budget::new(1 << 20);
        let pool = HeaderPool::new(vec![(BufMut::heap(8192), budget.try_charge(8192).unwrap())]);
        let first = pool.load(&[1; 5000]);
        let address = first.raw_spans()[0].address;
        assert_eq!((first.len(), first.to_vec()[4999], first.to_vec()[5000]), (8192, 1, 0));
        let second = pool.load(&[2; 100]);
        assert_ne!(second.raw_spans()[0].address, address, "lent twice");
        assert_eq!(first.to_vec()[..5000], [1; 5000]);
        drop(first);
        let third = pool.load(&[3; 100]);
        assert_eq!((third.raw_spans()[0].address, third.raw_spans()[0].bytes), (address, 4096));
        assert_eq!(third.to_vec()[100..], [0; 3996], "padded with what stood there before");
        assert_eq!(pool.load(&[4; 9000]).len(), 12288);
    }
}
