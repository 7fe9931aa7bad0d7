//! Starts a prefill and a decode process and moves work between them.

use std::io::{BufRead, BufReader, Write};
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use kvferry_engine::DeviceName;

use crate::Failure;
use crate::case::{Direction, Tokens, Work};
use crate::decode;
use crate::forms::Form;
use crate::interference::{self, Interference};
use crate::model::HeadSlice;
use crate::mooncake::{Mooncake, PeerEngine};
use crate::offload;
use crate::report::{JsonLines, Row, note, table};
use crate::room::Room;
use crate::shape::Selection;
use crate::transfer::Ran;
use crate::worker::{Answer, Command, Ready, Side, What};

#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Shapes by id or name, separated by commas; `daily` and `all` are lists [default: daily, with
    /// --interference R2,R6,R3]
    #[arg(long)]
    pub(crate) shape: Option<Selection>,
    /// Move these models' KV caches instead, separated by commas: deepseek-v3, qwen2.5-7b, qwen3-4b
    /// or kimi-k3
    #[arg(long, value_delimiter = ',', conflicts_with = "shape")]
    pub(crate) model: Vec<String>,
    /// Move the KV cache of the model that this Hugging Face config.json describes
    #[arg(long, value_name = "PATH", conflicts_with_all = ["shape", "model"])]
    pub(crate) model_config: Option<PathBuf>,
    /// Tokens of a model's KV cache; `levels` is one after the other of 16 from 64 to 131072, of
    /// which those that do not fit into host memory are left out
    #[arg(long, default_value = "4096")]
    tokens: Tokens,
    /// Tokens of a page of a model's KV cache
    #[arg(long, default_value = "64")]
    page: NonZeroU64,
    /// Move one rank's slice of a model's heads, such as 1/4: the prefill process holds the first
    /// of 4 slices of each token, the decode process the rows of all 4
    #[arg(long, value_name = "K/N")]
    pub(crate) head_slice: Option<HeadSlice>,
    /// How the request says which bytes to move; the same bytes in every form [default: ranges; of
    /// --cache paged]
    #[arg(long, conflicts_with = "interference")]
    pub(crate) form: Option<Form>,
    /// Batches that are submitted before any is waited for. All copy the same bytes to the same
    /// destination, so that it can be verified although they overlap in time; times, bytes and
    /// rates are those of all of them together
    #[arg(long, value_name = "N", default_value = "1", conflicts_with = "interference")]
    pub(crate) in_flight: NonZeroUsize,
    /// Which way bytes go: write, read or both; with --transport offload and --interference decode
    /// h2d, d2h, both or all [default: write; there all]
    #[arg(long)]
    pub(crate) op: Option<Ops>,
    /// Where the prefill process keeps its KV cache: host, cuda:N or rocm:N
    #[arg(long, default_value = "host")]
    pub(crate) device: DeviceName,
    /// Where the decode process keeps its own [default: the same]
    #[arg(long)]
    pub(crate) peer_device: Option<DeviceName>,
    /// Timed transfers of each case; of offload fewer, but at least 3, where they take 2 s together
    /// [default: 20, of --tokens levels 3]
    #[arg(long)]
    iterations: Option<NonZeroU64>,
    /// How bytes move
    #[arg(long, default_value = "peer")]
    pub(crate) transport: Transport,
    /// Connections of --transport tcp, and of its ceiling
    #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: u16,
    /// Measure another engine's transfers of the same pieces, too, after ours in the same run: its
    /// best of several settings counts
    #[arg(long, value_name = "ENGINE", conflicts_with_all = ["interference", "in_flight"])]
    peer: Option<PeerEngine>,
    /// Also time a bare kernel launch of the same descriptors, packed, without the engine; of at
    /// most 2 million
    #[arg(long)]
    pub(crate) bare: bool,
    /// Write one JSON object a line to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Seed of layouts and patterns
    #[arg(long, default_value = "1")]
    pub(crate) seed: u64,
    /// Measure transfers beside a compute load in the process that moves, and what each costs the
    /// other: at high and at normal stream priority, back to back and paced, three runs each in
    /// rotated order
    #[arg(long, value_name = "LOAD", conflicts_with_all = ["bare", "iterations"])]
    pub(crate) interference: Option<Interference>,
    /// Target rate of the paced transfers, in bursts every 50 ms [default: a tenth of what the
    /// shape reaches alone; of --interference decode 2.5]
    #[arg(long, value_name = "GIB_PER_S", requires = "interference", value_parser = interference::rate)]
    pub(crate) rate: Option<f64>,
    /// Milliseconds of each measurement of --interference
    #[arg(long, value_name = "MS", default_value = "500", value_parser = clap::value_parser!(u64).range(10..=60_000))]
    pub(crate) window: u64,
    #[command(flatten)]
    pub(crate) offload: offload::Options,
    #[command(flatten)]
    pub(crate) decode: decode::Options,
}

impl Options {
    pub(crate) fn iterations(&self) -> usize {
        let usual = if self.tokens == Tokens::Levels { 3 } else { 20 };
        self.iterations.map_or(usual, |iterations| iterations.get() as usize)
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Ops {
    /// The prefill process writes
    Write,
    /// The decode process reads
    Read,
    /// Write, then read; of offload h2d and d2h at once
    Both,
    /// From host memory to the GPU
    H2d,
    /// From the GPU to host memory
    D2h,
    /// H2d, d2h and both at once, one after the other
    All,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Transport {
    /// Directly into the other process's memory, mapped over IPC
    Peer,
    /// Over sockets of loopback; the ceiling is that of bare sockets
    Tcp,
    /// Between a GPU and host memory, in one process; the ceiling is one contiguous DMA
    Offload,
}

impl Transport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Tcp => "tcp",
            Self::Offload => "offload",
        }
    }
}

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

/// One of the two processes.
pub(crate) struct Worker {
    role: &'static str,
    child: Child,
    /// Taken when the worker is told to end.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub(crate) ready: Ready,
}

impl Worker {
    pub(crate) fn start(role: &'static str, device: DeviceName) -> Result<Self, Failure> {
        Self::start_with(role, device, &[])
    }

    /// As [`Self::start`], with these environment variables in place of those of this process.
    pub(crate) fn start_with(
        role: &'static str,
        device: DeviceName,
        knobs: &[(&str, &str)],
    ) -> Result<Self, Failure> {
        Self::start_behind(role, device, knobs, None)
    }

    /// As [`Self::start_with`]; peers are told this port for the batch protocol, where something has
    /// to forward to the worker's own.
    pub(crate) fn start_behind(
        role: &'static str,
        device: DeviceName,
        knobs: &[(&str, &str)],
        batch_port: Option<u16>,
    ) -> Result<Self, Failure> {
        let batch_port = batch_port.map(|port| ["--batch-port".to_owned(), port.to_string()]);
        let mut child = std::process::Command::new(std::env::current_exe()?)
            .args(["worker", "--device", &device.to_string()])
            .args(batch_port.iter().flatten())
            .envs(knobs.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("a worker has no pipes".into());
        };
        let mut output = BufReader::new(output);
        let mut line = String::new();
        output.read_line(&mut line)?;
        if line.is_empty() {
            return Err(
                format!("the {role} process ended before it was ready: {}", child.wait()?).into()
            );
        }
        Ok(Self { role, child, input: Some(input), output, ready: serde_json::from_str(&line)? })
    }

    pub(crate) fn ask(&mut self, command: &Command) -> Result<Answer, Failure> {
        let mut line = serde_json::to_string(command)?;
        line.push('\n');
        let sent = match &mut self.input {
            Some(input) => input.write_all(line.as_bytes()),
            None => return Err(format!("the {} process was told to end", self.role).into()),
        };
        let mut answer = String::new();
        if sent.is_ok() {
            self.output.read_line(&mut answer)?;
        }
        if answer.is_empty() {
            return Err(format!("the {} process ended: {}", self.role, self.child.wait()?).into());
        }
        match serde_json::from_str(&answer)? {
            Answer::Failed(error) => Err(format!("{} process: {error}", self.role).into()),
            answer => Ok(answer),
        }
    }

    pub(crate) fn open(&mut self, other: &Self) -> Result<(), Failure> {
        self.ask(&Command::Open { name: other.ready.name.clone() }).map(|_| ())
    }

    /// Address of the buffer, pieces, bytes.
    pub(crate) fn prepare(
        &mut self,
        work: &Work,
        side: Side,
        seed: u64,
    ) -> Result<(u64, u64, u64), Failure> {
        self.prepare_anew(work, side, seed, false)
    }

    /// As [`Self::prepare`]; a `fresh` buffer is freed and allocated again.
    pub(crate) fn prepare_anew(
        &mut self,
        work: &Work,
        side: Side,
        seed: u64,
        fresh: bool,
    ) -> Result<(u64, u64, u64), Failure> {
        match self.ask(&Command::Prepare { work: work.clone(), side, seed, fresh })? {
            Answer::Prepared { addr, descriptors, bytes } => Ok((addr, descriptors, bytes)),
            other => Err(self.unexpected(&other)),
        }
    }

    fn run(&mut self, command: &Command) -> Result<Ran, Failure> {
        match self.ask(command)? {
            Answer::Ran(ran) => Ok(ran),
            other => Err(self.unexpected(&other)),
        }
    }

    pub(crate) fn verify(
        &mut self,
        label: &str,
        source_seed: u64,
        guard_seed: u64,
    ) -> Result<(), Failure> {
        self.verify_without(label, source_seed, guard_seed, Vec::new())
    }

    /// As [`Self::verify`], without the pieces that begin in these runs of bytes: start, length.
    pub(crate) fn verify_without(
        &mut self,
        label: &str,
        source_seed: u64,
        guard_seed: u64,
        undefined: Vec<(u64, u64)>,
    ) -> Result<(), Failure> {
        match self.ask(&Command::Verify { source_seed, guard_seed, undefined })? {
            Answer::Verified { .. } => Ok(()),
            Answer::Mismatch(what) => Err(format!("WRONG BYTES in {label}: {what}").into()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Registered, peak resident, private resident and pinned bytes.
    fn usage(&mut self) -> Result<(u64, u64, u64, u64), Failure> {
        match self.ask(&Command::Usage)? {
            Answer::Usage { registered, peak, peak_private, pinned } => {
                Ok((registered, peak, peak_private, pinned))
            }
            other => Err(self.unexpected(&other)),
        }
    }

    pub(crate) fn unexpected(&self, answer: &Answer) -> Failure {
        format!("the {} process answered {answer:?}", self.role).into()
    }

    /// Closes its input, which ends it, and waits.
    pub(crate) fn end(mut self) -> Result<(), Failure> {
        self.input = None;
        let status = self.child.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(format!("the {} process ended with {status}", self.role).into())
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After `end` it is gone already; after a failure nobody waits for its work.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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
