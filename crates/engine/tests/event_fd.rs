//! The eventfd of an engine when its thread cannot be started. Alone in its process, since it takes all
//! address space away.

mod common;

use std::sync::Arc;

use kvferry_device::sim::{SimOptions, sim};
use kvferry_engine::{Engine, Error, Op, Range};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn readable(fd: &BorrowedFd<'_>, seconds: i64) -> bool {
    let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)).expect("polls") == 1
}

/// Bytes of this process's address space.
fn address_space() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = pages.split(' ').next().expect("numbers").parse::<u64>().expect("a number");
    pages * rustix::param::page_size() as u64
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("Linux").count()
}

#[test]
fn an_event_descriptor_that_nobody_could_serve_is_refused_each_time_and_tried_again() {
    let (device, control) = sim(&SimOptions::default()).expect("a simulated GPU");
    let engine = Engine::new(common::config(&[]), vec![Arc::clone(&device)]).expect("an engine");
    let buffer = engine.allocate(&device, 8192).expect("memory");
    let target = engine.local().expect("its own memory");
    control.hold();
    let range = [Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 4096 }];
    let running = engine.submit(&target, Op::Write, &range).expect("submits");

    let before = (getrlimit(Resource::As), descriptors());
    // Room for what is small, and not for a stack, which has 2 MiB.
    let current = Some(address_space() + (1 << 20));
    setrlimit(Resource::As, Rlimit { current, ..before.0 }).expect("lower is allowed");
    let refused = [(); 2].map(|()| engine.event_fd().map(drop));
    setrlimit(Resource::As, before.0).expect("as before");
    for refused in refused {
        assert!(matches!(refused, Err(Error::System { call: "thread", .. })), "{refused:?}");
    }
    assert_eq!(descriptors(), before.1, "a start that failed leaves a descriptor");

    // Now it is served, and so is the batch that ran before there was a descriptor.
    let fd = engine.event_fd().expect("there is room again");
    assert!(!readable(&fd, 0));
    control.release();
    assert!(readable(&fd, 60), "nobody tells of the batch's end");
    engine.release(running).expect("it ended");
}
