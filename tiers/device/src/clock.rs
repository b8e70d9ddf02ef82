//! The clock of real devices. Simulated ones ask `Env`.

use std::time::Instant;

#[expect(
    clippy::disallowed_methods,
    reason = "a real device times out by the machine's clock, also in a simulation"
)]
pub(crate) fn now() -> Instant {
    Instant::now()
}
