//! Files, buffers and subjects for the tests of real devices.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ebbtide_core::{BlockDevice, BoxFuture, block_on};
use ebbtide_device::conformance::Subject;
use ebbtide_device::{Prealloc, preallocate};
use ebbtide_mem::BufMut;

/// A file that goes when the test ends.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    /// A new file of so many bytes on the file system of `/var/tmp`, which is a disk.
    pub(crate) fn new(bytes: u64) -> Scratch {
        static FILES: AtomicU32 = AtomicU32::new(0);
        let index = FILES.fetch_add(1, Ordering::Relaxed);
        let path = Path::new("/var/tmp").join(format!("ebbtide-device-{}-{index}", std::process::id()));
        preallocate(&path, bytes, Prealloc::Written, &mut |_, _| {}).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A real device with buffers from the heap.
pub(crate) fn on_heap(device: &Arc<dyn BlockDevice>) -> Subject<'_> {
    Subject { device, make: &BufMut::heap, block_on: &run, threads: true }
}

/// Runs a future on this thread.
pub(crate) fn run(future: BoxFuture<'static, ()>) {
    block_on(future);
}
