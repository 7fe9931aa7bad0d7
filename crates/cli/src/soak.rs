//! Random transfers between two processes for as long as asked, every round verified, and a look
//! at what a leak would show in.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use kvferry_engine::{DeviceName, Engine, Error, Part, State, SubmitOptions, Target};
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::bench::Worker;
use crate::case::{Direction, Work};
use crate::chaos::{Chaos, Door};
use crate::forms::{Ends, Form, Request};
use crate::layout::Layout;
use crate::store_soak;
use crate::transfer::{PATIENCE, op, private_memory};
use crate::worker::{Answer, Command, Side};

/// How the bytes of a soak move.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Transport {
    /// Directly into the other process's memory, mapped over IPC
    Peer,
    /// Over sockets of loopback
    Tcp,
}

/// Rounds of random pieces: 1 to 50,000 of 1 B to 3 MiB at any alignment, as ranges, strided runs
/// and pages, written and read, with and without the kernel, in batches of several threads at once.
/// Buffers are freed and allocated again every few rounds. Every byte of the receiver is verified
/// after each round, guards included.
///
/// It fails at the first wrong byte, and if over the time after the warm-up a process gained more
/// than 64 MiB of private memory (192 with --store), 64 lines of /proc/self/maps, 8 file descriptors, 8 sockets or one
/// mapping of the other's memory, all buffers freed.
///
/// With --chaos, every other round goes through a proxy that delays, starves and cuts connections at
/// random. Its batches may fail, with a reason, and their destinations are then not verified; all
/// other bytes are, and every batch has to end, once. In the rounds between, the proxy is calm and
/// nothing may fail.
///
/// With --store, one process pages random pages of random shapes out to host memory, clears them and
/// pages them in again, from several threads, without a wait between; every page is verified after each
/// round, and every few seconds another store takes the place of the last.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// How long; a part of a minute will do
    #[arg(long, default_value = "10", value_parser = minutes)]
    minutes: f64,
    /// How bytes move between two processes; offload is soaked by --store
    #[arg(long, default_value = "peer")]
    transport: Transport,
    /// Connections of --transport tcp, each way [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    lanes: Option<u16>,
    /// Put a proxy between the two processes of --transport tcp that mistreats their connections; this
    /// is the seed of what it does. Peers wait 3 s for each other, and payload has checksums
    #[arg(long, value_name = "SEED")]
    chaos: Option<u64>,
    /// Soak a page store of --device
    #[arg(long, conflicts_with_all = ["transport", "lanes", "chaos", "peer_device"])]
    store: bool,
    /// Where the one process keeps its memory: host, cuda:N or rocm:N
    #[arg(long, default_value = "host")]
    device: DeviceName,
    /// Where the other keeps its own [default: the same]
    #[arg(long)]
    peer_device: Option<DeviceName>,
    /// Threads that submit at once
    #[arg(long, default_value = "4")]
    threads: NonZeroUsize,
    /// Bytes of a round, or of the device's pages, at most
    #[arg(long, value_name = "MIB", default_value = "64", value_parser = clap::value_parser!(u64).range(1..=4096))]
    most_mib: u64,
    /// Seed of everything random [default: another each time; it is printed]
    #[arg(long)]
    seed: Option<u64>,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(minutes) if minutes > 0.0 && minutes <= 1e6 => Ok(minutes),
        _ => Err("expected a number of minutes that is more than 0".to_owned()),
    }
}

/// Rounds before the first look at memory. Half of them are as large as a round can be, so that
/// whatever grows with the largest list has grown.
const WARM_UP: u64 = 24;

/// What a leak would show in, with all buffers freed.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Health {
    /// Allocations of the other process that are mapped here.
    mappings: u64,
    /// Lines of /proc/self/maps.
    maps: u64,
    /// Open file descriptors.
    descriptors: u64,
    /// Those that are sockets.
    sockets: u64,
    /// Resident bytes that are this process's own.
    private_bytes: u64,
}

/// How much of each a process may gain.
const MOST_GROWTH: Health =
    Health { mappings: 0, maps: 64, descriptors: 8, sockets: 8, private_bytes: 64 << 20 };

impl Health {
    pub(crate) fn of(target: &Target) -> Result<Self, Failure> {
        Self::here(target.open_count() as u64)
    }

    /// Of this process, which has so many allocations of others mapped.
    pub(crate) fn here(mappings: u64) -> Result<Self, Failure> {
        let (mut descriptors, mut sockets) = (0, 0);
        for descriptor in std::fs::read_dir("/proc/self/fd")? {
            descriptors += 1;
            // The one that reads the folder is closed by now.
            let opened = std::fs::read_link(descriptor?.path()).unwrap_or_default();
            sockets += u64::from(opened.to_string_lossy().starts_with("socket:"));
        }
        Ok(Self {
            mappings,
            maps: std::fs::read_to_string("/proc/self/maps")?.lines().count() as u64,
            descriptors,
            sockets,
            private_bytes: private_memory()?,
        })
    }

    /// What grew beyond its bound since `start`, with so many private bytes more that are no leak.
    pub(crate) fn leaks(&self, start: &Self, kept_bytes: u64) -> Vec<String> {
        let most_bytes = MOST_GROWTH.private_bytes + kept_bytes;
        [
            ("mappings", start.mappings, self.mappings, MOST_GROWTH.mappings),
            ("lines of /proc/self/maps", start.maps, self.maps, MOST_GROWTH.maps),
            ("file descriptors", start.descriptors, self.descriptors, MOST_GROWTH.descriptors),
            ("sockets", start.sockets, self.sockets, MOST_GROWTH.sockets),
            ("private bytes", start.private_bytes, self.private_bytes, most_bytes),
        ]
        .into_iter()
        .filter(|&(_, start, end, most)| end > start + most)
        .map(|(what, start, end, most)| {
            format!("{what} grew from {start} to {end}, more than by {most}")
        })
        .collect()
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mappings, maps, descriptors, sockets, private_bytes } = self;
        let private = *private_bytes as f64 / 1e6;
        write!(
            f,
            "{mappings} mappings, {maps} maps, {descriptors} fds ({sockets} sockets), {private:.1} MB"
        )
    }
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let seed = options.seed.unwrap_or_else(rand::random);
    let time = Duration::from_secs_f64(options.minutes * 60.0);
    if options.store {
        return store_soak::run(&store_soak::Plan {
            device: options.device,
            threads: options.threads.get(),
            time,
            most_bytes: options.most_mib << 20,
            seed,
        });
    }
    let mut soak = Soak::start(options, seed)?;
    let [first, second] = [0, 1].map(|worker: usize| &soak.workers[worker].ready.device);
    let over = match options.transport {
        Transport::Peer => "peer",
        Transport::Tcp => "tcp",
    };
    eprintln!("soak of {first} and {second} over {over}, seed {seed}");
    let outcome = soak.run(time, seed);
    println!("{soak}");
    let [start, end] = outcome?;
    println!("first process: {} -> {}; second: {} -> {}", start[0], end[0], start[1], end[1]);
    let leaks: Vec<_> =
        end.iter().zip(&start).flat_map(|(end, start)| end.leaks(start, 0)).collect();
    if !leaks.is_empty() {
        return Err(leaks.join("; ").into());
    }
    let [mut first, mut second] = soak.workers;
    first.ask(&Command::Close)?;
    second.ask(&Command::Close)?;
    first.end()?;
    second.end()
}

struct Soak {
    workers: [Worker; 2],
    random: SmallRng,
    threads: usize,
    most_bytes: u64,
    chaos: Option<Chaos>,
    /// Something of the round before may still come, so that its buffers are not used again.
    unquiet: bool,
    rounds: u64,
    bytes: u64,
    soaked: Soaked,
}

/// How long processes wait for each other that have a proxy between them, in seconds.
const CHAOS_PATIENCE: (&str, Duration) = ("3", Duration::from_secs(3));

impl Soak {
    fn start(options: &Options, seed: u64) -> Result<Self, Failure> {
        let lanes = options.lanes.unwrap_or(8).to_string();
        let mut knobs = Vec::new();
        if options.transport == Transport::Tcp {
            knobs.extend([("MC_FORCE_TCP", "1"), ("MC_TCP_LANES_PER_PEER", &lanes)]);
        } else if options.lanes.is_some() {
            return Err("--lanes are connections: add --transport tcp".into());
        }
        let mut chaos = None;
        let mut doors = [None, None];
        if options.chaos.is_some() {
            if options.transport != Transport::Tcp {
                return Err("--chaos is between the ends of sockets: add --transport tcp".into());
            }
            knobs.push(("MC_TCP_STATUS_TIMEOUT_SEC", CHAOS_PATIENCE.0));
            knobs.push(("MC_KVFERRY_TCP_CHECKSUMS", "1"));
            if std::env::var_os("KVFERRY_LOG").is_none() {
                // Failed batches are counted below; a line for each would hide it.
                knobs.push(("KVFERRY_LOG", "error"));
            }
            let proxy = chaos.insert(Chaos::start(CHAOS_PATIENCE.1)?);
            doors = [Some(proxy.door()?), Some(proxy.door()?)];
        }
        let devices = [options.device, options.peer_device.unwrap_or(options.device)];
        let mut start = |index: usize, role| {
            let port = doors[index].as_ref().map(Door::port);
            let worker = Worker::start_behind(role, devices[index], &knobs, port)?;
            if let (Some(chaos), Some(door)) = (&chaos, doors[index].take()) {
                let behind = worker.ready.batch.ok_or("a worker has no batch port")?;
                chaos.forward(door, behind, options.chaos.unwrap_or(0) + index as u64);
            }
            Ok::<_, Failure>(worker)
        };
        let mut workers = [start(0, "first")?, start(1, "second")?];
        let [first, second] = &mut workers;
        first.open(second)?;
        second.open(first)?;
        Ok(Self {
            workers,
            random: SmallRng::seed_from_u64(seed),
            threads: options.threads.get(),
            most_bytes: options.most_mib << 20,
            chaos,
            unquiet: false,
            rounds: 0,
            bytes: 0,
            soaked: Soaked::default(),
        })
    }

    /// Both processes' health after the warm-up and at the end.
    fn run(&mut self, time: Duration, seed: u64) -> Result<[[Health; 2]; 2], Failure> {
        let progress = ProgressBar::new(time.as_secs().max(1));
        progress.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} s {msg}")?);
        let round = |soak: &mut Self, largest, rages| {
            progress.set_message(format!("round {}, {} MB", soak.rounds, soak.bytes / 1_000_000));
            let done = soak.round(largest, rages);
            done.map_err(|error| format!("round {} of seed {seed}: {error}", soak.rounds))
        };
        for warm_up in 0..WARM_UP {
            round(self, warm_up % 2 == 0, false)?;
        }
        let start = self.health()?;
        let begin = Instant::now();
        while begin.elapsed() < time {
            if self.chaos.is_some() {
                round(self, false, true)?;
            }
            round(self, false, false)?;
            progress.set_position(begin.elapsed().as_secs());
        }
        let end = self.health()?;
        progress.finish_and_clear();
        Ok([start, end])
    }

    /// Moves and verifies one random layout. Where the proxy `rages`, batches may fail.
    fn round(&mut self, largest: bool, rages: bool) -> Result<(), Failure> {
        let random = &mut self.random;
        let seed: u64 = random.random();
        let direction = *[Direction::Write, Direction::Read].choose(random).expect("there are two");
        let fresh = [0; 2].map(|_| random.random_ratio(1, 4) || self.unquiet);
        let work = Work::Random { most_bytes: self.most_bytes, largest };
        let [first, second] = &mut self.workers;
        let (source, destination) = if random.random() { (first, second) } else { (second, first) };
        let (from, _, bytes) = source.prepare_anew(&work, Side::Source, seed, fresh[0])?;
        let (to, ..) = destination.prepare_anew(&work, Side::Destination, seed, fresh[1])?;
        let (source_seed, guard_seed) = (seed.wrapping_add(1), seed.wrapping_add(2));
        source.ask(&Command::Fill { side: Side::Source, seed: source_seed })?;
        destination.ask(&Command::Fill { side: Side::Destination, seed: guard_seed })?;
        let (mover, peer) = match direction {
            Direction::Write => (&mut *source, to),
            Direction::Read => (&mut *destination, from),
        };
        let command = Command::Soak { direction, peer, threads: self.threads, seed };
        let chaos = self.chaos.as_ref().filter(|_| rages);
        chaos.inspect(|chaos| chaos.rage());
        let answer = mover.ask(&command);
        chaos.inspect(|chaos| chaos.calm());
        let mut soaked = match answer? {
            Answer::Soaked(soaked) => soaked,
            other => return Err(mover.unexpected(&other)),
        };
        let allowed = |reason: &String| rages && !reason.contains("checksum");
        if let Some(reason) = soaked.failed.keys().find(|reason| !allowed(reason)) {
            return Err(reason.as_str().into());
        }
        let undefined = std::mem::take(&mut soaked.undefined);
        self.unquiet = !undefined.is_empty();
        self.soaked.add(soaked);
        let label = format!("random pieces of seed {seed}, {}", direction.name());
        destination.verify_without(&label, source_seed, guard_seed, undefined)?;
        self.rounds += 1;
        self.bytes += bytes;
        Ok(())
    }

    /// Of both processes, all buffers freed.
    fn health(&mut self) -> Result<[Health; 2], Failure> {
        for worker in &mut self.workers {
            worker.ask(&Command::Free)?;
        }
        let [first, second] = &mut self.workers;
        let health = |worker: &mut Worker| match worker.ask(&Command::Health)? {
            Answer::Health(health) => Ok(health),
            other => Err(worker.unexpected(&other)),
        };
        Ok([health(first)?, health(second)?])
    }
}

/// What became of the batches of a round.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Soaked {
    completed: u64,
    /// How many, by reason.
    failed: BTreeMap<String, u64>,
    /// Destinations of those that failed, which are undefined: start and length, from the beginning
    /// of the buffer.
    undefined: Vec<(u64, u64)>,
    /// Milliseconds until the last one ended.
    slowest: u64,
}

impl Soaked {
    fn add(&mut self, other: Self) {
        self.completed += other.completed;
        for (reason, count) in other.failed {
            *self.failed.entry(reason).or_default() += count;
        }
        self.undefined.extend(other.undefined);
        self.slowest = self.slowest.max(other.slowest);
    }
}

impl fmt::Display for Soak {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, bytes, soaked, chaos, .. } = self;
        let failed: u64 = soaked.failed.values().sum();
        write!(
            f,
            "{rounds} rounds verified, {bytes} bytes; batches: {} completed",
            soaked.completed
        )?;
        let Some(chaos) = chaos else { return Ok(()) };
        let slowest = soaked.slowest as f64 / 1e3;
        writeln!(f, ", {failed} failed, the slowest took {slowest:.1} s")?;
        for (reason, count) in &soaked.failed {
            writeln!(f, "{count:6} x {reason}")?;
        }
        write!(f, "the proxy's deeds: {}", chaos.counts())
    }
}

/// Moves the pieces of a layout once, in batches of several forms that several threads submit at
/// the same time. A batch may fail, by its transport.
pub(crate) fn move_in_shares(
    engine: &Engine,
    target: &Target,
    layout: &Layout,
    ends: Ends,
    threads: usize,
    seed: u64,
) -> Result<Soaked, Failure> {
    let mut random = SmallRng::seed_from_u64(seed);
    let forms: Vec<_> = [Form::Ranges, Form::Strided, Form::Paged]
        .into_iter()
        .filter(|form| form.of(layout).is_ok())
        .collect();
    let form = *forms.choose(&mut random).expect("ranges are always a form");
    let batches = threads * random.random_range(1..=4);
    let shares: Vec<_> = Request::new(layout, form, ends)?
        .split(batches)
        .into_iter()
        .map(|share| {
            let ranges = random.random_ratio(1, 3);
            let share = if ranges { Request::Ranges(share.expanded()) } else { share };
            (share, random.random_ratio(1, 8))
        })
        .collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = shares
            .chunks(batches / threads)
            .map(|shares| scope.spawn(|| move_shares(engine, target, ends, shares)))
            .collect();
        let mut all = Soaked::default();
        for thread in threads {
            let moved = thread.join();
            all.add(moved.unwrap_or_else(|_| Err("a thread of the soak panicked".into()))?);
        }
        Ok(all)
    })
}

/// Submits each share as a batch, without the kernel where it says so, then waits for all. Each has
/// to end, once.
fn move_shares(
    engine: &Engine,
    target: &Target,
    ends: Ends,
    shares: &[(Request<'_>, bool)],
) -> Result<Soaked, Failure> {
    let submit = |(share, without_kernel): &(Request<'_>, bool)| {
        let part = Part { target, op: op(ends.direction), copies: share.copies() };
        let options = SubmitOptions { without_kernel: *without_kernel, ..SubmitOptions::default() };
        engine.submit_parts(&[part], &options)
    };
    let begin = Instant::now();
    let batches = shares.iter().map(submit).collect::<Result<Vec<_>, _>>()?;
    let mut states = Vec::with_capacity(batches.len());
    for &batch in &batches {
        let state = engine.wait(batch, PATIENCE)?.state;
        if state == State::Running {
            return Err(format!("a batch did not end in {} s", PATIENCE.as_secs()).into());
        }
        states.push(state);
    }
    let mut soaked = Soaked { slowest: begin.elapsed().as_millis() as u64, ..Soaked::default() };
    for ((batch, state), (share, _)) in batches.into_iter().zip(states).zip(shares) {
        let later = engine.poll(batch)?.state;
        if later != state {
            return Err(format!("a batch ended twice: {state:?}, then {later:?}").into());
        }
        match state {
            State::Failed(Error::Tcp { reason, .. }) if !reason.is_empty() => {
                *soaked.failed.entry(without_numbers(&reason)).or_default() += 1;
                soaked.undefined.extend(ends.destinations(share));
            }
            State::Failed(error) => return Err(error.into()),
            _ => soaked.completed += 1,
        }
        engine.release(batch)?;
    }
    Ok(soaked)
}

/// A reason without its times and ports, to count those that differ in nothing else.
fn without_numbers(reason: &str) -> String {
    let mut kind = String::with_capacity(reason.len());
    for character in reason.chars() {
        match character.is_ascii_digit() {
            true if kind.ends_with('N') => {}
            true => kind.push('N'),
            false => kind.push(character),
        }
    }
    kind
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_that_differ_in_numbers_alone_are_one() {
        let found = without_numbers("cannot connect to 127.0.0.1:4660: no answer in 3000 ms");
        assert_eq!(found, "cannot connect to N.N.N.N:N: no answer in N ms");
    }

    #[test]
    fn growth_beyond_a_bound_is_a_leak_and_is_named() {
        let start =
            Health { mappings: 0, maps: 100, descriptors: 10, sockets: 5, private_bytes: 1 << 20 };
        let within = Health {
            mappings: 0,
            maps: 164,
            descriptors: 18,
            sockets: 13,
            private_bytes: (64 << 20) + (1 << 20),
        };
        assert_eq!(within.leaks(&start, 0), Vec::<String>::new());
        let kept = Health { private_bytes: within.private_bytes + 4096, ..within };
        assert_eq!((kept.leaks(&start, 4095).len(), kept.leaks(&start, 4096).len()), (1, 0));
        for (beyond, what) in [
            (Health { mappings: 1, ..within }, "mappings grew from 0 to 1, more than by 0"),
            (Health { maps: 165, ..within }, "lines of /proc/self/maps grew from 100 to 165"),
            (Health { descriptors: 19, ..within }, "file descriptors grew from 10 to 19"),
            (Health { sockets: 14, ..within }, "sockets grew from 5 to 14"),
            (Health { private_bytes: 1 << 30, ..within }, "private bytes grew from 1048576"),
        ] {
            let leaks = beyond.leaks(&start, 0);
            assert!(leaks.len() == 1 && leaks[0].starts_with(what), "{leaks:?}");
        }
    }
}
