//! The C ABI as C sees it: the header's structures are the library's, and no sequence of calls with
//! wrong, stale or foreign arguments does anything but answer.

mod answers;
mod bytes;
mod calls;
mod engines;
mod header;

use std::process::Command;
use std::sync::Mutex;

use calls::{Arena, World};
use engines::{Gpu, api, engine, last_error};
use kvferry::abi::types::ABI_VERSION;
use kvferry::abi::{Api, kvferry_load};
use rand::SeedableRng;
use rand::rngs::StdRng;

#[test]
fn other_versions_have_no_table() {
    for version in [0, ABI_VERSION + 1, u32::MAX] {
        assert!(kvferry_load(version).is_null(), "{version}");
    }
    assert_eq!(api().struct_size, size_of::<Api>() as u64);
}

/// A log is a process's: the test runs itself again, with an unknown knob to be warned about.
#[test]
fn the_log_knob_bounds_what_is_written_to_standard_error() {
    const CHILD: &str = "KVFERRY_TEST_LOGS";
    if std::env::var_os(CHILD).is_some() {
        let engine = engine();
        // SAFETY: the handle is a number.
        assert_eq!(unsafe { (api().destroy)(engine) }, 0);
        return;
    }
    for (level, warns, informs) in [
        ("off", false, false),
        ("error", false, false),
        ("warn", true, false),
        ("debug", true, true),
    ] {
        let name = "the_log_knob_bounds_what_is_written_to_standard_error";
        let child = Command::new(std::env::current_exe().expect("linux"))
            .args(["--exact", name])
            .envs([(CHILD, "1"), ("MC_KVFERRY_LOG", level), ("MC_KVFERRY_STREAM", "7")])
            .output()
            .expect("starts");
        let log = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{log}");
        assert_eq!(log.contains("MC_KVFERRY_STREAM"), warns, "{level}: {log}");
        let more = log.contains("INFO") || log.contains("DEBUG");
        assert_eq!(more, informs, "{level}: {log}");
    }
}

fn seed() -> u64 {
    let given = std::env::var("KVFERRY_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(rand::random::<u64>);
    println!("KVFERRY_TEST_SEED={seed}");
    seed
}

/// Calls of a longer run: `KVFERRY_TEST_CALLS=10000000`.
fn calls() -> usize {
    let given = std::env::var("KVFERRY_TEST_CALLS").ok();
    given.map_or(10_000, |calls| calls.parse().expect("a number"))
}

fn arena() -> &'static mut Arena {
    Box::leak(Box::new([0; _]))
}

/// Whatever is called, with whatever numbers: a status, and memory that was not offered is not
/// touched. Pointers are right, null or misaligned: a wild one is beyond any library.
#[test]
fn ten_thousand_random_calls_are_answered() {
    let mut random = StdRng::seed_from_u64(seed());
    let engines = Mutex::new(vec![engine(), Gpu::shared().engine()]);
    let mut world = World::new(&engines, arena());
    let mut statuses = [0_u32; 16];
    for _ in 0..calls() {
        let status = world.call(&mut random);
        assert_ne!(status, 12, "a fault of the library's own: {}", last_error());
        statuses[status as usize] += 1;
    }
    // They were answers of every kind, and not one refusal ten thousand times.
    let least = calls() as u32 / 100;
    assert!(statuses[..3].iter().all(|status| *status > least), "{statuses:?}");
    assert!(statuses[0] > 10 * least, "{statuses:?}");
    assert!(world.ordered() > 0, "no batch behind work of an application's");
    world.wait_for_all();
    for engine in engines.into_inner().expect("whole") {
        // SAFETY: a number.
        assert_eq!(unsafe { (api().destroy)(engine) }, 0);
    }
}

/// The same from several threads, which share engines and take them from each other: whoever is in a
/// call when its engine is destroyed gets an answer, too.
#[test]
fn threads_that_call_while_engines_are_destroyed_are_answered() {
    let seed = seed();
    let engines = Mutex::new(vec![engine(), Gpu::shared().engine(), engine()]);
    let caller = |thread: u64| {
        let mut random = StdRng::seed_from_u64(seed.wrapping_add(thread));
        let mut world = World::new(&engines, arena());
        let mut statuses = [0_u32; 16];
        for _ in 0..calls() / 4 {
            let status = world.call(&mut random);
            assert_ne!(status, 12, "a fault of the library's own: {}", last_error());
            statuses[status as usize] += 1;
        }
        world.wait_for_all();
        statuses
    };
    let all = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|thread| scope.spawn(move || caller(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("answered")).collect::<Vec<_>>()
    });
    let of = |status: usize| all.iter().map(|statuses| statuses[status]).sum::<u32>();
    let least = calls() as u32 / 100;
    assert!(of(0) > 10 * least && of(1) > least && of(2) > least, "{all:?}");
    for engine in engines.into_inner().expect("whole") {
        // SAFETY: a number.
        assert_eq!(unsafe { (api().destroy)(engine) }, 0);
    }
}

/// The fuzz target's corpus, on the stable build: calls of which some are right.
#[test]
fn the_corpus_of_calls_is_answered() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/abi");
    let files = std::fs::read_dir(corpus).expect("a corpus");
    let mut all = [0; 16];
    for file in files {
        let bytes = std::fs::read(file.expect("a file").path()).expect("a file");
        let statuses = bytes::calls(&bytes);
        all.iter_mut().zip(statuses).for_each(|(all, status)| *all += status);
    }
    assert!(all[..3].iter().all(|status| *status > 10), "{all:?}");
}
