//! What the devices that talk to a kernel ask of an operation before it starts.

use ebbtide_core::{DeviceInfo, Error, Op, Result};
use ebbtide_mem::RawSpan;

/// Looks at `op` and says how many bytes it moves, or why it is refused (Invalid, naming the offset).
pub(crate) fn check(info: &DeviceInfo, op: &Op) -> Result<u64> {
    let align = u64::from(info.align_bytes);
    match op {
        Op::Read { offset, into, .. } => {
            let bytes = (into.len() as u64).next_multiple_of(align);
            check_place(info, "read", *offset, bytes)?;
            let room = check_memory(info, "read", *offset, into.raw_spans(), bytes)?;
            if room < bytes {
                return Err(Error::invalid(format!(
                    "read {} at {offset}: {bytes} bytes do not fit the {room} bytes of the buffer",
                    info.name
                )));
            }
            Ok(bytes)
        }
        Op::Write { offset, from } => {
            let mut bytes = 0;
            for buf in from {
                bytes += check_memory(info, "write", *offset, buf.raw_spans(), u64::MAX)?;
            }
            if bytes == 0 || !bytes.is_multiple_of(align) {
                return Err(Error::invalid(format!(
                    "write {} at {offset}: {bytes} bytes, need a multiple of {align}",
                    info.name
                )));
            }
            check_place(info, "write", *offset, bytes)?;
            Ok(bytes)
        }
    }
}

/// Refuses an offset that is not aligned and a range that leaves the device.
pub(crate) fn check_place(info: &DeviceInfo, what: &str, offset: u64, bytes: u64) -> Result<()> {
    let align = u64::from(info.align_bytes);
    if !offset.is_multiple_of(align) {
        return Err(Error::invalid(format!(
            "{what} {} at {offset}: alignment {}, need {align}",
            info.name,
            1_u64 << offset.trailing_zeros()
        )));
    }
    if offset.checked_add(bytes).is_none_or(|end| end > info.capacity_bytes) {
        return Err(Error::invalid(format!(
            "{what} {} at {offset}: {bytes} bytes reach past the end at {}",
            info.name, info.capacity_bytes
        )));
    }
    Ok(())
}

/// The bytes of `spans`, of which the first `used_max` are used. Refuses those that direct I/O could not use.
fn check_memory(info: &DeviceInfo, what: &str, offset: u64, spans: &[RawSpan], used_max: u64) -> Result<u64> {
    let align = u64::from(info.memory_align_bytes);
    let mut bytes = 0;
    for span in spans {
        let used = u64::from(span.bytes).min(used_max.saturating_sub(bytes));
        if !(span.address as usize as u64 | used).is_multiple_of(align) {
            return Err(Error::invalid(format!(
                "{what} {} at {offset}: {used} bytes of memory at {:p}, need a multiple of {align}",
                info.name, span.address
            )));
        }
        bytes += u64::from(span.bytes);
    }
    Ok(bytes)
}
