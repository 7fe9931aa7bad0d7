//! Starts a prefill and a decode process and moves work between them.

mod options;
mod worker;

use std::path::PathBuf;

use indicatif::{ProgressBar, ProgressStyle};

pub(crate) use self::options::{Ops, Options, Transport};
pub(crate) use self::worker::Worker;
use crate::Failure;
use crate::case::{Direction, Tokens, Work};
use crate::decode;
use crate::forms::Form;
use crate::interference::{self, Interference};
use crate::mooncake::{Mooncake, PeerEngine};
use crate::offload;
use crate::report::{JsonLines, Row, note, table};
use crate::room::Room;
use crate::transfer::Ran;
use crate::worker::{Answer, Command, Side, What};

/// Transfers before the timed ones.
const WARM_UP: usize = 3;
/// Descriptors of a bare launch, at most: 48 MB of pinned memory.
const MOST_BARE: u64 = 2_000_000;
/// Contiguous copies that make the ceiling.
const CEILING_TIMES: usize = 8;

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let of_a_model = !options.model.is_empty() || options.model_config.is_some();
    if options.tokens == Tokens::Levels && !of_a_model {
        return Err("--tokens is of a model's KV cache: add --model or --model-config".into());
    }
    if options.peer.is_some() && options.transport != Transport::Tcp {
        return Err("--peer moves over TCP: add --transport tcp".into());
    }
    if options.interference == Some(Interference::Decode) {
        return decode::run(options);
    }
    if options.decode.are_given() {
        return Err(
            "--process, --layout, --runs and --decode-program are of --interference decode".into(),
        );
    }
    if options.transport == Transport::Offload {
        return offload::run(options);
    }
    if options.offload.are_given() {
        return Err("--mode, --cache, --sweep, --grid, --host-layout, --samples and --plot are of --transport offload and of --interference decode".into());
    }
    let works: Vec<Work> = match (&options.model[..], &options.model_config) {
        ([], None) => {
            let default = if options.interference.is_some() { "R2,R6,R3" } else { "daily" };
            let selection = match &options.shape {
                Some(selection) => selection.clone(),
                None => default.parse()?,
            };
            selection.shapes.iter().map(|shape| Work::Shape(shape.id.clone())).collect()
        }
        (names, config) => {
            let (page, heads) = (options.page, options.head_slice);
            let mut models: Vec<_> = names.iter().map(|name| (Some(name.clone()), None)).collect();
            models.extend(config.clone().map(|config| (None, Some(config))));
            let levels = |(name, config): (Option<String>, Option<PathBuf>)| {
                options.tokens.each().into_iter().map(move |tokens| Work::Model {
                    name: name.clone(),
                    config: config.clone(),
                    tokens,
                    page,
                    heads,
                })
            };
            models.into_iter().flat_map(levels).collect()
        }
    };
    if options.head_slice.is_some() && !of_a_model {
        return Err("--head-slice is of a model's KV cache: add --model or --model-config".into());
    }
    let directions: &[Direction] = match options.op {
        None | Some(Ops::Write) => &[Direction::Write],
        Some(Ops::Read) => &[Direction::Read],
        Some(Ops::Both) => &[Direction::Write, Direction::Read],
        Some(Ops::H2d | Ops::D2h | Ops::All) => {
            return Err("--op h2d, d2h and all are of --transport offload".into());
        }
    };
    // Refuse a work that cannot be laid out before any process starts, or has not the form.
    let labels = works.iter().map(Work::label).collect::<Result<Vec<_>, _>>()?;
    let asked = options.form.unwrap_or(Form::Ranges);
    let forms = works.iter().zip(&labels).map(|(work, label)| {
        let form = asked.of(&work.layout(options.seed)?);
        form.map_err(|why| Failure::from(format!("{label} has no {} form: {why}", asked.name())))
    });
    let forms = forms.collect::<Result<Vec<_>, _>>()?;
    let peer_device = options.peer_device.unwrap_or(options.device);
    let mut json = options.json.as_deref().map(JsonLines::create).transpose()?;
    if let Some(interference) = options.interference {
        if options.transport != Transport::Peer {
            return Err("--interference measures --transport peer alone, except for decode".into());
        }
        let works: Vec<_> = works.into_iter().zip(labels).collect();
        return interference::run(options, interference, directions, &works, json.as_mut());
    }
    let mut peer_engine = match options.peer {
        Some(PeerEngine::Mooncake) => {
            Some(Mooncake::start([options.device, peer_device], options.lanes)?)
        }
        None => None,
    };
    let lanes = options.lanes.to_string();
    let knobs: &[(&str, &str)] = match options.transport {
        Transport::Peer | Transport::Offload => &[],
        Transport::Tcp => &[("MC_FORCE_TCP", "1"), ("MC_TCP_LANES_PER_PEER", &lanes)],
    };
    let mut prefill = Worker::start_with("prefill", options.device, knobs)?;
    let mut decode = Worker::start_with("decode", peer_device, knobs)?;
    prefill.open(&decode)?;
    decode.open(&prefill)?;
    eprintln!(
        "prefill on {} ({}), decode on {} ({}); kernel: {}",
        prefill.ready.device,
        prefill.ready.device_name,
        decode.ready.device,
        decode.ready.device_name,
        prefill.ready.kernel
    );

    let progress = ProgressBar::new((works.len() * directions.len()) as u64);
    progress.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}")?);
    let mut rows = Vec::new();
    for ((work, label), &form) in works.iter().zip(&labels).zip(&forms) {
        for &direction in directions {
            progress.set_message(format!("{label} {}", direction.name()));
            let room = Room {
                devices: [options.device, peer_device],
                form,
                with_peer: peer_engine.is_some(),
                of_a_list: options.tokens == Tokens::Levels
                    || options.shape.as_ref().is_some_and(|selection| selection.all),
            };
            let layout = work.layout(options.seed)?;
            if options.tokens == Tokens::Levels {
                // The memory of the level before is not in the way of this one.
                prefill.ask(&Command::Free)?;
                decode.ask(&Command::Free)?;
            }
            if let Some(why) = room.refusal(&layout)? {
                progress.suspend(|| println!("skipped {label}: {why}"));
                progress.inc(1);
                continue;
            }
            let case = Case { work, label, form, direction };
            let say = |line: &str| progress.suspend(|| println!("{line}"));
            let mut row = measure(options, &mut prefill, &mut decode, &case, &say)?;
            if let Some(engine) = &mut peer_engine {
                prefill.ask(&Command::Free)?;
                decode.ask(&Command::Free)?;
                let (seed, times) = (options.seed, options.iterations());
                let compared = engine.measure(&layout, direction, times, seed, row.gbps)?;
                if let Some(why) = compared.failure() {
                    say(&format!("Mooncake did not move {label}: {why}"));
                }
                row.mooncake = Some(compared);
            }
            if let Some(json) = &mut json {
                json.write(&row)?;
            }
            rows.push(row);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    println!("{}\n{}", table(&rows), note(&rows));
    prefill.ask(&Command::Close)?;
    decode.ask(&Command::Close)?;
    prefill.end()?;
    decode.end()
}

/// One line of the table.
struct Case<'a> {
    work: &'a Work,
    label: &'a str,
    form: Form,
    direction: Direction,
}

fn measure(
    options: &Options,
    prefill: &mut Worker,
    decode: &mut Worker,
    case: &Case<'_>,
    say: &dyn Fn(&str),
) -> Result<Row, Failure> {
    let &Case { work, label, form, direction } = case;
    let seed = options.seed;
    let in_flight = options.in_flight.get();
    let (source, descriptors, bytes) = prefill.prepare(work, Side::Source, seed)?;
    let (destination, ..) = decode.prepare(work, Side::Destination, seed)?;
    let source_seed = seed.wrapping_add(1);
    prefill.ask(&Command::Fill { side: Side::Source, seed: source_seed })?;

    // Every check has guard bytes of its own, so that no check can pass on the bytes of another.
    let mut guard_seed = seed.wrapping_add(100);
    let mut guard = |decode: &mut Worker| {
        guard_seed += 1;
        decode.ask(&Command::Fill { side: Side::Destination, seed: guard_seed }).map(|_| guard_seed)
    };
    let run_many = |prefill: &mut Worker, decode: &mut Worker, what, times, in_flight| {
        let (mover, peer) = match direction {
            Direction::Write => (prefill, destination),
            Direction::Read => (decode, source),
        };
        mover.run(&Command::Run { direction, peer, times, in_flight, what })
    };
    let run = |prefill: &mut Worker, decode: &mut Worker, what, times| {
        run_many(prefill, decode, what, times, 1)
    };
    let verify = |decode: &mut Worker, guard_seed| decode.verify(label, source_seed, guard_seed);

    let guards = guard(decode)?;
    let cold = run(prefill, decode, What::Pieces(form), 1)?;
    verify(decode, guards)?;
    let ceiling = match options.transport {
        Transport::Peer | Transport::Offload => {
            run(prefill, decode, What::Contiguous, CEILING_TIMES)?
        }
        Transport::Tcp => over_sockets(prefill, decode, options.lanes.into(), bytes)?,
    };
    let mut bare = Ran::default();
    if options.bare && descriptors > MOST_BARE {
        say(&format!("no bare launch of {label}: {descriptors} pieces are more than {MOST_BARE}"));
    } else if options.bare {
        let guards = guard(decode)?;
        bare = run(prefill, decode, What::BareLaunch, WARM_UP + options.iterations())?;
        if !bare.whole.is_empty() {
            verify(decode, guards)?;
        }
    }
    let guards = guard(decode)?;
    run(prefill, decode, What::Pieces(form), WARM_UP)?;
    let timed = run_many(prefill, decode, What::Pieces(form), options.iterations(), in_flight)?;
    verify(decode, guards)?;

    let mover = match direction {
        Direction::Write => &mut *prefill,
        Direction::Read => &mut *decode,
    };
    let (mover_registered, peak_rss_bytes, private_rss_bytes, pinned_bytes) = mover.usage()?;
    let other = match direction {
        Direction::Write => decode,
        Direction::Read => prefill,
    };
    let (other_registered, ..) = other.usage()?;
    let p50 = percentile(&timed.whole, 50);
    let gbps = |bytes: u64, nanoseconds: u64| bytes as f64 / nanoseconds.max(1) as f64;
    let ceiling_gbps = gbps(bytes, percentile(&ceiling.whole, 50));
    let bytes = bytes * in_flight as u64;
    let one_batch = p50 as f64 / in_flight as f64;
    let submit = percentile(&timed.submit, 50) as f64;
    let per_descriptor = |nanoseconds: f64| nanoseconds / descriptors.max(1) as f64;
    let bare_p50 = bare
        .whole
        .get(WARM_UP..)
        .filter(|times| !times.is_empty())
        .map(|times| percentile(times, 50));
    Ok(Row {
        shape: label.to_owned(),
        transport: options.transport.name().to_owned(),
        device: options.device.to_string(),
        peer_device: options.peer_device.unwrap_or(options.device).to_string(),
        op: direction.name().to_owned(),
        form: form.name().to_owned(),
        in_flight,
        descriptors,
        bytes,
        iterations: timed.whole.len(),
        p50_us: p50 as f64 / 1e3,
        p99_us: percentile(&timed.whole, 99) as f64 / 1e3,
        gbps: gbps(bytes, p50),
        ceiling_gbps,
        ratio: gbps(bytes, p50) / ceiling_gbps,
        submit_us: submit / 1e3,
        submit_ns_per_descriptor: per_descriptor(submit),
        poll_ns: (timed.poll > 0.0).then_some(timed.poll),
        ended_poll_ns: timed.ended_poll,
        cold_us: percentile(&cold.whole, 50) as f64 / 1e3,
        bare_us: bare_p50.map(|bare| bare as f64 / 1e3),
        over_bare_ns_per_descriptor: bare_p50.map(|bare| per_descriptor(one_batch - bare as f64)),
        path: timed.path,
        verified: true,
        registered_bytes: mover_registered + other_registered,
        peak_rss_bytes,
        private_rss_bytes,
        pinned_bytes,
        heap_bytes: timed.heap,
        cold_heap_bytes: cold.heap,
        mooncake: None,
    })
}

/// The same bytes over as many bare sockets, from the prefill to the decode process.
fn over_sockets(
    prefill: &mut Worker,
    decode: &mut Worker,
    lanes: usize,
    bytes: u64,
) -> Result<Ran, Failure> {
    match decode.ask(&Command::Receive { lanes })? {
        Answer::Receives { port } => {
            prefill.run(&Command::Send { port, lanes, bytes, times: WARM_UP + CEILING_TIMES })
        }
        other => Err(decode.unexpected(&other)),
    }
}

/// Nearest-rank percentile.
pub(crate) fn percentile(times: &[u64], percent: usize) -> u64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let times: Vec<u64> = (1..=100).rev().collect();
        assert_eq!((percentile(&times, 50), percentile(&times, 99)), (50, 99));
        assert_eq!((percentile(&[7], 50), percentile(&[7], 99), percentile(&[], 50)), (7, 7, 0));
        assert_eq!(percentile(&[3, 1, 2], 99), 3);
    }
}
