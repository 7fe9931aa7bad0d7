//! Alone in its process, since it takes all of the process's file descriptors.

mod common;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use common::{PATIENCE, Side, reply};
use kvferry_wire::handshake::{Kind, encode};
use rustix::process::{Resource, getrlimit, setrlimit};

/// FAILURES.md B39.
#[test]
fn a_node_without_descriptors_rests_and_serves_again_when_there_are_some() {
    let side = Side::new(4096);
    let stat = File::open("/proc/self/stat").unwrap();
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = Some(256);
    setrlimit(Resource::Nofile, limit).unwrap();

    let mut taken: Vec<File> = std::iter::from_fn(|| stat.try_clone().ok()).collect();
    taken.pop();
    // Takes the last one, so that the node has none to accept it with.
    let mut client = side.stranger();
    client.write_all(&encode(Kind::Probe, b"{}")).unwrap();
    let before = ticks(&stat);
    std::thread::sleep(Duration::from_millis(500));
    let spent = ticks(&stat) - before;
    assert!(spent < 10, "{spent} ticks of 10 ms in half a second: the node spins");

    drop(taken);
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(reply(&mut client).expect("an answer").kind, Kind::Probe);
}

/// Processor time of this process.
fn ticks(stat: &File) -> u64 {
    let mut bytes = [0; 1024];
    let count = stat.read_at(&mut bytes, 0).unwrap();
    let text = String::from_utf8_lossy(&bytes[..count]);
    let (_, fields) = text.rsplit_once(") ").unwrap();
    fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}
