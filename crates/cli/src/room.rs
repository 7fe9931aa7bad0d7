//! Whether a work can be measured on this machine.

use kvferry_engine::DeviceName;

use crate::Failure;
use crate::forms::Form;
use crate::layout::Layout;

/// Ranges of a request, at most: 192 MB of them.
const MOST_RANGES: u64 = 8_000_000;

/// What a bench knows of its memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Of the source, and of the destination.
    pub(crate) devices: [DeviceName; 2],
    pub(crate) form: Form,
    /// Another engine is measured after ours, by lists and with files of both sides' bytes in host
    /// memory. Ours is free then.
    pub(crate) with_peer: bool,
    /// The user did not name this work, so it may be left out if it does not fit.
    pub(crate) of_a_list: bool,
}

impl Room {
    /// Why a work is left out: as ranges for its number of pieces, and of a list for its bytes.
    pub(crate) fn refusal(&self, layout: &Layout) -> Result<Option<String>, Failure> {
        let pieces = layout.pieces.len() as u64;
        if (self.form == Form::Ranges || self.with_peer) && pieces > MOST_RANGES {
            let why = format!("{pieces} ranges are more than {MOST_RANGES}: use --form auto");
            return Ok(Some(why));
        }
        if !self.of_a_list {
            return Ok(None);
        }
        let need = self.need(layout);
        let available = available()?.filter(|&available| need > available / 10 * 9);
        let text = |available| {
            format!(
                "it needs {} MB of host memory, {} MB are available",
                need >> 20,
                available >> 20
            )
        };
        Ok(available.map(text))
    }

    /// Bytes of host memory that it takes.
    fn need(&self, layout: &Layout) -> u64 {
        let sides = [layout.source_bytes, layout.destination_bytes];
        let of_host = |(device, bytes)| if device == DeviceName::Host { bytes } else { 0 };
        let ours: u64 = self.devices.into_iter().zip(sides).map(of_host).sum();
        let (buffers, of_a_piece) = match self.with_peer {
            true => (sides.into_iter().sum(), 800),
            false => (ours, 200),
        };
        buffers + layout.pieces.len() as u64 * of_a_piece
    }
}

/// Bytes that can be had without swapping, if the system says so.
fn available() -> Result<Option<u64>, Failure> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Ok(kib.map(|kib| kib << 10))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Piece;

    fn layout(bytes: u64) -> Layout {
        let piece = Piece { source: 256, destination: 256, len: 64 };
        Layout::new(vec![piece], bytes, 2 * bytes)
    }

    const GPU_TO_HOST: Room = Room {
        devices: [DeviceName::Cuda(0), DeviceName::Host],
        form: Form::Ranges,
        with_peer: false,
        of_a_list: true,
    };

    #[test]
    fn the_bytes_of_host_memory_count_and_those_of_a_peers_files() {
        let host = Room { devices: [DeviceName::Host; 2], ..GPU_TO_HOST };
        assert_eq!(GPU_TO_HOST.need(&layout(1000)), 2000 + 200);
        assert_eq!(host.need(&layout(1000)), 3000 + 200);
        assert_eq!(Room { with_peer: true, ..GPU_TO_HOST }.need(&layout(1000)), 3000 + 800);
    }

    #[test]
    fn a_work_of_a_list_that_does_not_fit_is_left_out_with_the_reason() {
        let huge = layout(1 << 50);
        let why = GPU_TO_HOST.refusal(&huge).unwrap().expect("no machine has so much");
        assert!(why.starts_with("it needs 2147483648 MB of host memory, "), "{why}");
        assert_eq!(GPU_TO_HOST.refusal(&layout(1 << 20)).unwrap(), None);
        let named = Room { of_a_list: false, ..GPU_TO_HOST };
        assert_eq!(named.refusal(&huge).unwrap(), None, "the user insists");
    }
}
