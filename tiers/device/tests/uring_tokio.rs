//! The device on tokio-uring passes the suite, as slow as it is at gathers.
#![cfg(feature = "uring-tokio")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{Scratch, on_heap};
use ebbtide_core::BlockDevice;
use ebbtide_device::conformance::{self, CAPACITY_BYTES_MIN};
use ebbtide_device::{UringOptions, UringTokioDevice};

#[test]
fn conforms() {
    for options in [
        UringOptions::default(),
        UringOptions { io_bytes_max: 12 << 10, queue_depth: 1, queue_ops_max: 1, ..Default::default() },
    ] {
        let scratch = Scratch::new(CAPACITY_BYTES_MIN);
        let device: Arc<dyn BlockDevice> = Arc::new(UringTokioDevice::open(&scratch.0, &options).unwrap());
        conformance::all(on_heap(&device));
    }
}
