//! The bare arm of benches: a file beside the store, driven on the ring of the store's first device.

use std::path::Path;
use std::sync::Arc;

use ebbtide_core::{Charge, Error, HotTier, Result};
use ebbtide_device::{BareResult, BareSpec, DirectDevice};
use ebbtide_mem::BufMut;

/// A file beside the store, of extents that were written before.
pub struct Bare {
    device: Arc<dyn DirectDevice>,
    hot: Arc<dyn HotTier>,
    /// The store's own file: it is only read.
    own: bool,
}

/// Buffers for a bare run, from the store's own registered arena; they count against its staging while they live.
pub struct BareBuffers {
    /// The buffers.
    pub buffers: Vec<BufMut>,
    _charges: Vec<Charge>,
}

impl Bare {
    /// Opens the file at `path`, made `bytes` long and written, beside `device`.
    pub(crate) fn open(
        device: &Arc<dyn DirectDevice>,
        hot: Arc<dyn HotTier>,
        path: &Path,
        bytes: u64,
    ) -> Result<Bare> {
        Ok(Bare { device: device.open_beside(path, Some(bytes))?, hot, own: false })
    }

    /// The store's own file on `device`, to be read.
    pub(crate) fn own(device: &Arc<dyn DirectDevice>, hot: Arc<dyn HotTier>) -> Bare {
        Bare { device: Arc::clone(device), hot, own: true }
    }

    /// `count` buffers of `bytes` from the store's arena. Full when staging has no room for them.
    pub fn buffers(&self, bytes: u32, count: u32) -> Result<BareBuffers> {
        let (mut buffers, mut charges) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let Some((buffer, charge)) = self.hot.alloc_staging(bytes as usize) else {
                return Err(Error::full(format!(
                    "staging has no room for {count} buffers of {bytes} bytes: raise it"
                )));
            };
            buffers.push(buffer);
            charges.push(charge);
        }
        Ok(BareBuffers { buffers, _charges: charges })
    }

    /// Runs a closed loop on the store's ring; see [`BareSpec`]. The store must have nothing in flight.
    ///
    /// Invalid when it would write to the store's own file.
    pub fn drive(&self, spec: BareSpec) -> Result<BareResult> {
        if self.own && spec.write {
            return Err(Error::invalid("a bare run never writes to the store's own file"));
        }
        self.device.drive(spec)
    }

    /// Operations that the device keeps in flight at most.
    pub fn depth_max(&self) -> u32 {
        self.device.info().queue_depth
    }

    /// The file's size in bytes.
    pub fn bytes(&self) -> u64 {
        self.device.info().capacity_bytes
    }
}
