//! Positional I/O passes the suite.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{Scratch, on_heap};
use ebbtide_core::BlockDevice;
use ebbtide_device::conformance::{self, CAPACITY_BYTES_MIN};
use ebbtide_device::{DirectDevice, PsyncDevice, PsyncOptions};

#[test]
fn conforms() {
    for (threads, queue_ops_max, direct) in [(8, 4096, true), (1, 1, true), (3, 5, false)] {
        let scratch = Scratch::new(CAPACITY_BYTES_MIN);
        let options = PsyncOptions { threads, queue_ops_max, direct, ..Default::default() };
        let device = Arc::new(PsyncDevice::open(&scratch.0, &options).unwrap());
        let block: Arc<dyn BlockDevice> = device.clone();
        conformance::all(on_heap(&block));
        let direct: Arc<dyn DirectDevice> = device;
        conformance::close(&direct, on_heap(&block));
    }
}
