//! Which device copies, and which one the calling thread is left with.

use kvferry_device::sim::{Fault, SimOptions, current_device, set_current_device, sim};
use kvferry_engine::{Buffer, Error, Op, Range, RangeError};

use crate::support::{LONG, bytes, direct, engine_on, pattern, simulated, transfer};

#[test]
fn b05_two_engines_of_one_process_use_each_others_memory_directly() {
    let (device, control) = simulated(0);
    let (a, b) = (engine_on(vec![device.clone()]), engine_on(vec![device.clone()]));
    let (from, to) =
        (a.allocate(&device, 4096).expect("memory"), b.allocate(&device, 4096).expect("memory"));
    from.write(0, &pattern(4096, 5)).expect("inside");
    let target = direct(&a, &b);
    for current in [None, Some(0), Some(1)] {
        set_current_device(current);
        to.write(0, &[0; 4096]).expect("inside");
        transfer(
            &a,
            &target,
            Op::Write,
            &[Range { local: from.addr(), remote: to.addr(), len: 4096 }],
        );
        assert_eq!(bytes(&to, 0, 4096), pattern(4096, 5), "current device {current:?}");
    }
    set_current_device(None);
    assert_eq!(control.calls("open"), 0, "no handle is opened in the process that made it");
    drop(to);
    drop(b);
    let gone =
        a.submit(&target, Op::Write, &[Range { local: from.addr(), remote: 1 << 40, len: 1 }]);
    assert!(matches!(gone, Err(Error::PeerLost { .. })), "{gone:?}");
}

#[test]
fn b10_every_call_works_on_its_own_fresh_thread_and_leaves_it_without_a_device() {
    fn fresh<R: Send>(call: impl FnOnce() -> R + Send) -> R {
        std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    assert_eq!(current_device(), None);
                    let result = call();
                    assert_eq!(current_device(), None, "the call left a device current");
                    result
                })
                .join()
                .expect("works on a fresh thread")
        })
    }
    let (device, _control) = fresh(|| simulated(3));
    let engine = fresh(|| engine_on(vec![device.clone()]));
    let buffer = fresh(|| engine.allocate(&device, 8192).expect("memory"));
    let target = fresh(|| direct(&engine, &engine));
    let range = Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 4096 };
    let id = fresh(|| engine.submit(&target, Op::Write, &[range]).expect("submits"));
    fresh(|| engine.wait(id, LONG).expect("known"));
    fresh(|| engine.release(id).expect("ended"));
    fresh(|| drop(buffer));
    fresh(|| drop((engine, target, device)));
}

#[test]
fn b13_the_callers_current_device_survives_every_call_good_or_bad() {
    let (device, control) = simulated(0);
    set_current_device(Some(1));
    let same = |what: &str| assert_eq!(current_device(), Some(1), "after {what}");
    let engine = engine_on(vec![device.clone()]);
    same("Engine::new");
    let buffer = engine.allocate(&device, 8192).expect("memory");
    same("allocate");
    let target = direct(&engine, &engine);
    same("open");
    let range = Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 4096 };
    for call in ["enter", "copy", "record", "fired"] {
        control.fail(call, 0, Fault::Refused);
        let _ = engine.submit(&target, Op::Write, &[range]).map(|id| engine.wait(id, LONG));
        same(call);
    }
    let bad = engine.submit(&target, Op::Write, &[Range { len: 1 << 40, ..range }]);
    assert!(bad.is_err());
    same("a refused submit");
    drop(buffer);
    same("unregister and free");
    drop(engine);
    same("drop");
    set_current_device(None);
}

#[test]
fn b14_work_goes_to_the_device_of_the_memory_and_nothing_to_device_zero() {
    let (zero, zero_control) = simulated(0);
    let (three, _) = simulated(3);
    let engine = engine_on(vec![zero, three.clone()]);
    let buffer = engine.allocate(&three, 1 << 20).expect("memory");
    buffer.write(0, &pattern(1 << 19, 1)).expect("inside");
    let target = direct(&engine, &engine);
    let idle = ["launch", "copy", "record", "allocate"].map(|call| zero_control.calls(call));
    let ranges: Vec<Range> = (0..100)
        .map(|at| {
            let offset = at * 5000;
            Range {
                local: buffer.addr() + offset,
                remote: buffer.addr() + (1 << 19) + offset,
                len: 4096,
            }
        })
        .collect();
    std::thread::scope(|scope| {
        scope.spawn(|| transfer(&engine, &target, Op::Write, &ranges)).join()
    })
    .expect("works");
    for at in 0..100 {
        assert_eq!(
            bytes(&buffer, (1 << 19) + at * 5000, 4096),
            pattern(1 << 19, 1)[at as usize * 5000..][..4096]
        );
    }
    assert_eq!(["launch", "copy", "record", "allocate"].map(|call| zero_control.calls(call)), idle);
}

#[test]
fn b17_slices_of_one_gpu_are_two_devices_though_they_share_a_pci_address() {
    let (whole, _) = simulated(0);
    let options = SimOptions { ordinal: 1, slice_of: Some(0), ..SimOptions::default() };
    let (slice, _) = sim(&options).expect("always there");
    assert_eq!(whole.info().pci_bus_id, slice.info().pci_bus_id);
    let (a, b) = (engine_on(vec![whole.clone()]), engine_on(vec![slice.clone()]));
    let local = a.allocate(&whole, 4096).expect("memory");
    let remote = b.allocate(&slice, 4096).expect("memory");
    let range = Range { local: local.addr(), remote: remote.addr(), len: 4096 };
    let refused = a.submit(&direct(&a, &b), Op::Write, &[range]);
    let named = slice.info().uuid.to_string();
    assert!(
        matches!(&refused, Err(Error::Unreachable { remote, .. }) if *remote == named),
        "{refused:?}"
    );
}

#[test]
fn ranges_on_two_devices_are_refused_by_name() {
    let ((zero, _), (one, _)) = (simulated(0), simulated(1));
    let engine = engine_on(vec![zero.clone(), one.clone()]);
    let (a, b) = (
        engine.allocate(&zero, 8192).expect("memory"),
        engine.allocate(&one, 8192).expect("memory"),
    );
    let target = direct(&engine, &engine);
    let within =
        |buffer: &Buffer| Range { local: buffer.addr(), remote: buffer.addr() + 4096, len: 10 };
    let mixed = engine.submit(&target, Op::Write, &[within(&a), within(&b)]);
    assert_eq!(
        mixed,
        Err(RangeError::MixedDevices { index: 1, device: "sim:1".into(), first: "sim:0".into() }
            .into())
    );
    let across = Range { local: a.addr(), remote: b.addr(), len: 10 };
    let unreachable = engine.submit(&target, Op::Write, &[across]);
    assert!(matches!(unreachable, Err(Error::Unreachable { .. })), "{unreachable:?}");
}
