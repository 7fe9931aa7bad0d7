//! Functions of the table about batches.

use std::ffi::c_void;
use std::time::Duration;

use kvferry_engine::{
    BatchId, Consumer, Copies, Error, OffloadMode, Op, Paged, Pages, Part, Path, Producer, Range,
    State, Strided, SubmitOptions,
};

use super::guard::{self, call, list, out, put, put_structure, structure};
use super::numbers::*;
use super::plugin::{self, Plugin};
use super::status::{self, Refusal};
use super::types::{self, BatchHandle, EngineHandle, Status, TargetHandle};

pub(super) unsafe extern "C" fn ranges(
    target: TargetHandle,
    opcode: u32,
    from: *const Range,
    count: usize,
    options: *const types::SubmitOptions,
    batch: *mut BatchHandle,
) -> Status {
    call(|| {
        // SAFETY: the caller's contract, as in the header; the list is read before this returns.
        let ranges = unsafe { list("ranges", from, count) }?;
        // SAFETY: as above.
        unsafe { to_one(target, opcode, ranges.into(), options, batch) }
    })
}

pub(super) unsafe extern "C" fn strided(
    target: TargetHandle,
    opcode: u32,
    from: *const types::Strided,
    count: usize,
    options: *const types::SubmitOptions,
    batch: *mut BatchHandle,
) -> Status {
    call(|| {
        // SAFETY: the caller's contract, as in the header.
        let forms = unsafe { list("forms", from, count) }?;
        let forms: Vec<_> = forms
            .iter()
            .map(|form| Strided {
                local: form.local,
                remote: form.remote,
                len: form.length,
                count: form.count,
                local_stride: form.local_stride,
                remote_stride: form.remote_stride,
            })
            .collect();
        // SAFETY: as above.
        unsafe { to_one(target, opcode, (&forms).into(), options, batch) }
    })
}

pub(super) unsafe extern "C" fn paged(
    target: TargetHandle,
    opcode: u32,
    from: *const types::Paged,
    count: usize,
    options: *const types::SubmitOptions,
    batch: *mut BatchHandle,
) -> Status {
    call(|| {
        // SAFETY: the caller's contract, as in the header.
        let forms = unsafe { list("forms", from, count) }?;
        let form = |(at, form): (usize, &types::Paged)| {
            let numbered = |refusal: Refusal| refusal.at("form", at);
            Ok(Paged {
                // SAFETY: as above.
                local: unsafe { pages(&form.local) }.map_err(numbered)?,
                // SAFETY: as above.
                remote: unsafe { pages(&form.remote) }.map_err(numbered)?,
                layers: form.layers,
                rows: form.rows,
                row_bytes: form.row_bytes,
            })
        };
        let forms = forms.iter().enumerate().map(form).collect::<Result<Vec<_>, Refusal>>()?;
        // SAFETY: as above.
        unsafe { to_one(target, opcode, (&forms).into(), options, batch) }
    })
}

/// # Safety
/// As the header says.
unsafe fn pages<'a>(from: &types::Pages) -> Result<Pages<'a>, Refusal> {
    let count = usize::try_from(from.count).unwrap_or(usize::MAX);
    Ok(Pages {
        addr: from.address,
        // SAFETY: the caller's contract.
        numbers: unsafe { list("page numbers", from.numbers, count) }?,
        page_stride: from.page_stride,
        layer_stride: from.layer_stride,
        row_stride: from.row_stride,
    })
}

pub(super) unsafe extern "C" fn requests(
    engine: EngineHandle,
    from: *const types::Request,
    count: usize,
    options: *const types::SubmitOptions,
    batch: *mut BatchHandle,
) -> Status {
    call(|| {
        // SAFETY: the caller's contract, as in the header.
        let requests = unsafe { list("requests", from, count) }?;
        let plugin = plugin::find(engine)?;
        let groups = group(engine, requests)?;
        let peers = groups.iter().map(|group| plugin.target(group.target));
        let peers = peers.collect::<Result<Vec<_>, _>>()?;
        let part = |(group, peer): (&'_ Group, &'_ std::sync::Arc<kvferry_node::Peer>)| {
            (group.op, peer.target().clone())
        };
        let targets: Vec<_> = groups.iter().zip(&peers).map(part).collect();
        let parts: Vec<_> = groups
            .iter()
            .zip(&targets)
            .map(|(group, (op, target))| Part { target, op: *op, copies: (&group.ranges).into() })
            .collect();
        // SAFETY: as above.
        unsafe { submit(engine, &plugin, &parts, options, batch) }
    })
}

/// Requests that one part of a batch holds.
struct Group {
    target: TargetHandle,
    op: Op,
    ranges: Vec<Range>,
}

/// Requests that are looked at together: few enough to stay in the nearest cache until they are copied.
const TOGETHER: usize = 64;

impl Group {
    /// Whether all of them belong here. It looks at all and decides once, which is several times faster
    /// than one by one.
    fn takes(&self, requests: &[types::Request]) -> bool {
        let opcode = match self.op {
            Op::Read => READ,
            Op::Write => WRITE,
        };
        let differs = |request: &types::Request| {
            let TargetHandle { engine, id } = request.target;
            u64::from(request.opcode ^ opcode | request.reserved)
                | (engine ^ self.target.engine)
                | (id ^ self.target.id)
        };
        requests.iter().fold(0, |all, request| all | differs(request)) == 0
    }
}

/// In the order in which targets and directions first occur. An engine asks for a few targets at a
/// time, and for runs of one.
fn group(engine: EngineHandle, requests: &[types::Request]) -> Result<Vec<Group>, Refusal> {
    let range = |request: &types::Request| {
        let &types::Request { source: local, offset: remote, length: len, .. } = request;
        Range { local, remote, len }
    };
    let mut groups: Vec<Group> = Vec::new();
    let mut last = 0;
    for (chunk, first) in requests.chunks(TOGETHER).zip((0..).step_by(TOGETHER)) {
        if let Some(group) = groups.get_mut(last).filter(|group| group.takes(chunk)) {
            group.ranges.extend(chunk.iter().map(range));
            continue;
        }
        for (at, request) in (first..).zip(chunk) {
            let op = op(request.opcode).map_err(|refusal| refusal.at("request", at))?;
            let target = request.target;
            if request.reserved != 0 {
                return Err(Refusal::invalid(format!("request {at}: a reserved field is set")));
            }
            if target.engine != engine {
                let other = target.engine;
                return Err(Refusal::invalid(format!(
                    "request {at}: its target is engine {other}'s, not {engine}'s"
                )));
            }
            let fits = |group: &Group| group.target == target && group.op == op;
            if !groups.get(last).is_some_and(fits) {
                last = groups.iter().position(fits).unwrap_or(groups.len());
                if last == groups.len() {
                    let ranges = Vec::with_capacity(requests.len() - at);
                    groups.push(Group { target, op, ranges });
                }
            }
            groups[last].ranges.push(range(request));
        }
    }
    Ok(groups)
}

fn op(opcode: u32) -> Result<Op, Refusal> {
    match opcode {
        READ => Ok(Op::Read),
        WRITE => Ok(Op::Write),
        _ => Err(Refusal::invalid(format!("opcode {opcode} is neither read (0) nor write (1)"))),
    }
}

/// # Safety
/// As the header says.
unsafe fn to_one(
    handle: TargetHandle,
    opcode: u32,
    copies: Copies<'_>,
    options: *const types::SubmitOptions,
    batch: *mut BatchHandle,
) -> Result<(), Refusal> {
    let plugin = plugin::find(handle.engine)?;
    let peer = plugin.target(handle)?;
    let part = Part { target: peer.target(), op: op(opcode)?, copies };
    // SAFETY: the caller's contract.
    unsafe { submit(handle.engine, &plugin, &[part], options, batch) }
}

/// # Safety
/// As the header says.
unsafe fn submit(
    engine: EngineHandle,
    plugin: &Plugin,
    parts: &[Part<'_>],
    from: *const types::SubmitOptions,
    batch: *mut BatchHandle,
) -> Result<(), Refusal> {
    out("batch", batch)?;
    // SAFETY: the caller's contract.
    let given = unsafe { structure("options", from) }?;
    let after = match given.producer_kind {
        NO_PRODUCER => None,
        // SAFETY: the caller's contract, as in the header: it lives until this returns.
        STREAM => Some(unsafe { Producer::stream(given.producer) }),
        // SAFETY: as above.
        EVENT => Some(unsafe { Producer::event(given.producer) }),
        kind => return Err(Refusal::invalid(format!("producer_kind {kind} is none of 0, 1, 2"))),
    };
    if given.reserved != 0 {
        return Err(Refusal::invalid("options: a reserved field is set"));
    }
    let offload = match given.offload_mode {
        OFFLOAD_AUTO => OffloadMode::Auto,
        OFFLOAD_DIRECT => OffloadMode::Direct,
        OFFLOAD_KERNEL => OffloadMode::Kernel,
        OFFLOAD_STAGED => OffloadMode::Staged,
        mode => return Err(Refusal::invalid(format!("offload_mode {mode} is none of 0 to 3"))),
    };
    let count = usize::try_from(given.behind_count).unwrap_or(usize::MAX);
    // SAFETY: the caller's contract.
    let behind = unsafe { list("behind", given.behind, count) }?;
    if let Some(other) = behind.iter().find(|batch| batch.engine != engine) {
        let text = format!("a batch to run behind is engine {}'s, not {engine}'s", other.engine);
        return Err(Refusal::invalid(text));
    }
    let behind: Vec<_> = behind.iter().map(|batch| BatchId::from_bits(batch.id)).collect();
    let without_kernel = given.without_kernel != 0;
    let options = SubmitOptions { after, behind: &behind, without_kernel, offload };
    let id = plugin.engine.submit_parts(parts, &options).map_err(|error| match error {
        Error::Range(_) if parts.len() > 1 => Refusal::invalid(format!(
            "{error}; positions count the requests of one target and opcode"
        )),
        error => error.into(),
    })?;
    // SAFETY: the caller's contract.
    unsafe { put("batch", batch, BatchHandle { engine, id: id.to_bits() }) }
}

pub(super) unsafe extern "C" fn poll(batch: BatchHandle, to: *mut types::BatchStatus) -> Status {
    // SAFETY: the caller's contract, as in the header.
    call(|| unsafe { ask(batch, to, Duration::ZERO) })
}

pub(super) unsafe extern "C" fn wait(
    batch: BatchHandle,
    timeout: u64,
    to: *mut types::BatchStatus,
) -> Status {
    // SAFETY: the caller's contract, as in the header.
    call(|| unsafe { ask(batch, to, Duration::from_micros(timeout)) })
}

/// # Safety
/// As the header says.
unsafe fn ask(
    batch: BatchHandle,
    to: *mut types::BatchStatus,
    timeout: Duration,
) -> Result<(), Refusal> {
    out("status", to)?;
    let plugin = plugin::find(batch.engine)?;
    let found = plugin.engine.wait(BatchId::from_bits(batch.id), timeout)?;
    let (state, failure) = match &found.state {
        State::Running => (RUNNING, OK),
        State::Completed => (COMPLETED, OK),
        State::Failed(error) => {
            guard::set_last_error(error.to_string());
            (FAILED, status::of(error))
        }
    };
    let (path, bytes) = (number(found.path), found.bytes);
    let status = types::BatchStatus { struct_size: 0, state, path, bytes, failure, reserved: 0 };
    // SAFETY: the caller's contract.
    unsafe { put_structure("status", to, &status) }
}

/// `KVFERRY_PATH_*`.
pub(super) fn number(path: Path) -> u32 {
    match path {
        Path::None => PATH_NONE,
        Path::Kernel => PATH_KERNEL,
        Path::Dma => PATH_DMA,
        Path::Mixed => PATH_MIXED,
        Path::Memcpy => PATH_MEMCPY,
        Path::Tcp => PATH_TCP,
        Path::TcpStaged => PATH_TCP_STAGED,
        Path::Staged => PATH_STAGED,
    }
}

pub(super) unsafe extern "C" fn cancel(batch: BatchHandle) -> Status {
    call(|| {
        let plugin = plugin::find(batch.engine)?;
        Ok(plugin.engine.cancel(BatchId::from_bits(batch.id))?)
    })
}

pub(super) unsafe extern "C" fn signal(batch: BatchHandle, stream: *mut c_void) -> Status {
    call(|| {
        let plugin = plugin::find(batch.engine)?;
        // SAFETY: the caller's contract, as in the header: it lives until this returns.
        let consumer = unsafe { Consumer::stream(stream) };
        Ok(plugin.engine.signal(BatchId::from_bits(batch.id), consumer)?)
    })
}

pub(super) unsafe extern "C" fn release(batch: BatchHandle) -> Status {
    call(|| {
        let plugin = plugin::find(batch.engine)?;
        Ok(plugin.engine.release(BatchId::from_bits(batch.id))?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, id: u64, at: u64) -> types::Request {
        let target = TargetHandle { engine: 9, id };
        types::Request { opcode, reserved: 0, source: at, target, offset: at + 1, length: at + 2 }
    }

    #[test]
    fn requests_of_one_target_and_direction_are_one_group_wherever_they_stand() {
        // Runs that end within, at and behind the borders of what is looked at together.
        for runs in [[1, 1, 1, 1], [63, 1, 64, 65], [200, 3, 128, 1], [64, 64, 64, 64]] {
            let whose = [(WRITE, 5), (READ, 5), (WRITE, 6), (WRITE, 5)];
            let run = |(&(opcode, id), length): (&(u32, u64), usize)| vec![(opcode, id); length];
            let all: Vec<_> = whose.iter().zip(runs).flat_map(run).collect();
            let requests: Vec<_> =
                all.iter().zip(0..).map(|(&(opcode, id), at)| request(opcode, id, at)).collect();
            let groups = group(9, &requests).expect("good requests");
            assert_eq!(groups.len(), 3);
            for group in &groups {
                let (opcode, id) =
                    (if group.op == Op::Write { WRITE } else { READ }, group.target.id);
                let expected: Vec<_> = (0..)
                    .zip(&all)
                    .filter(|(_, it)| **it == (opcode, id))
                    .map(|(at, _)| at)
                    .collect();
                let found: Vec<u64> = group.ranges.iter().map(|range| range.local).collect();
                assert_eq!(found, expected);
                let whole =
                    |range: &Range| (range.remote, range.len) == (range.local + 1, range.local + 2);
                assert!(group.ranges.iter().all(whole));
            }
        }
    }

    #[test]
    fn a_wrong_request_is_named_by_its_position() {
        for at in [0, 1, 63, 64, 100, 127] {
            for wrong in 0..3 {
                let mut requests: Vec<_> = (0..128).map(|at| request(WRITE, 5, at)).collect();
                match wrong {
                    0 => requests[at].opcode = 2,
                    1 => requests[at].reserved = 1,
                    _ => requests[at].target.engine = 8,
                }
                let text = group(9, &requests).err().expect("it is wrong").text;
                assert!(text.starts_with(&format!("request {at}: ")), "{text}");
            }
        }
    }
}
