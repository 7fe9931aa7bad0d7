use super::*;
use alloc::vec;
use proptest::prelude::*;

const STOCK: &str = r#"{"name":"10.0.0.1:15428","protocol":"tcp","tcp_data_port":16021,"tcp_proto_version":2,
    "timestamp":"2026-09-23 10:00:00.000001","rdma_server_name":"x",
    "buffers":[{"name":"10.0.0.1:15428","addr":140000000000000,"length":1048576,"shm_name":"00ff"}]}"#;

fn descriptor() -> Descriptor {
    let device = Uuid([0xa1; 16]);
    let allocations = vec![Allocation {
        device,
        id: 7,
        vendor: Vendor::Cuda,
        base: 0x1000,
        length: 0x1000,
        mappable: true,
    }];
    let regions = vec![Region { addr: 0x1800, length: 0x800, device, id: 7, segment: None }];
    Descriptor {
        name: "127.0.0.1:9".into(),
        protocol: Protocol::One("tcp".into()),
        tcp_data_port: 0,
        tcp_proto_version: 2,
        timestamp: "1".into(),
        buffers: vec![Buffer {
            name: "127.0.0.1:9".into(),
            addr: 0x1800,
            length: 0x800,
            protocol: None,
        }],
        kvferry: Some(Extension {
            version: VERSION,
            incarnation: Id([0xb2; 16]),
            process: Id([0xc3; 16]),
            host: Uuid([0xd4; 16]),
            pid: 5,
            socket: "kvferry-1".into(),
            allocations,
            regions,
            batch: None,
        }),
    }
}

/// Parses our descriptor after a change to it.
fn refusal(change: impl FnOnce(&mut Extension)) -> SegmentError {
    let mut changed = descriptor();
    change(changed.kvferry.as_mut().unwrap());
    let error = parse(&serde_json::to_vec(&changed).unwrap()).unwrap_err();
    assert_eq!(encode(&changed), Err(error.clone()), "what is refused is not published either");
    error
}

#[test]
fn a_descriptor_has_these_bytes_and_survives_them() {
    let json = encode(&descriptor()).unwrap();
    let expected = concat!(
        r#"{"name":"127.0.0.1:9","protocol":"tcp","tcp_data_port":0,"tcp_proto_version":2,"timestamp":"1","#,
        r#""buffers":[{"name":"127.0.0.1:9","addr":6144,"length":2048}],"#,
        r#""kvferry":{"version":1,"incarnation":"b2b2b2b2b2b2b2b2b2b2b2b2b2b2b2b2","#,
        r#""process":"c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3","host":"d4d4d4d4-d4d4-d4d4-d4d4-d4d4d4d4d4d4","#,
        r#""pid":5,"socket":"kvferry-1","allocations":[{"device":"a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1","#,
        r#""id":7,"vendor":"cuda","base":4096,"length":4096}],"regions":[{"addr":6144,"length":2048,"#,
        r#""device":"a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1","id":7}]}}"#,
        "\n",
    );
    assert_eq!(String::from_utf8(json.clone()).unwrap(), expected);
    assert_eq!(parse(&json), Ok(descriptor()));
}

#[test]
fn a_stock_peers_descriptor_is_read() {
    let stock = parse(STOCK.as_bytes()).unwrap();
    assert_eq!((stock.tcp_data_port, stock.tcp_proto_version), (16021, 2));
    assert_eq!(stock.buffers[0].addr, 140_000_000_000_000);
    assert_eq!(stock.kvferry, None);
}

#[test]
fn protocols_are_a_string_or_an_array_and_the_rest_may_be_absent() {
    let several = parse(br#"{"name":"a:1","protocol":["hip","tcp"]}"#).unwrap();
    assert!(
        several.protocol.offers("tcp")
            && several.protocol.offers("hip")
            && !several.protocol.offers("rdma")
    );
    assert_eq!((several.tcp_data_port, several.tcp_proto_version), (0, 1));
    assert!(parse(br#"{"name":"a:1","protocol":"tcp"}"#).unwrap().protocol.offers("tcp"));
}

#[test]
fn memory_that_cannot_be_mapped_says_so_and_other_memory_says_nothing() {
    let mut changed = descriptor();
    let allocation = |it: &Descriptor| it.kvferry.as_ref().unwrap().allocations[0];
    changed.kvferry.as_mut().unwrap().allocations[0].mappable = false;
    let json = encode(&changed).unwrap();
    assert!(
        String::from_utf8(json.clone()).unwrap().contains(r#""length":4096,"mappable":false}"#)
    );
    assert!(!allocation(&parse(&json).unwrap()).mappable);
    assert!(!String::from_utf8(encode(&descriptor()).unwrap()).unwrap().contains("mappable"));
}

#[test]
fn a_vendor_of_the_future_does_not_spoil_the_rest() {
    let json = String::from_utf8(encode(&descriptor()).unwrap()).unwrap().replace("cuda", "metal");
    let extension = parse(json.as_bytes()).unwrap().kvferry.unwrap();
    assert_eq!(extension.allocations[0].vendor, Vendor::Unknown);
}

#[test]
fn another_version_is_named_though_nothing_else_of_it_fits() {
    let json = br#"{"name":"a:1","protocol":"tcp","kvferry":{"version":2,"regions":"elsewhere"}}"#;
    assert_eq!(parse(json), Err(SegmentError::Version { theirs: 2 }));
}

#[test]
fn impossible_extents_are_refused() {
    for (addr, length) in [(0, 1), (1, 0), (u64::MAX, 1), (1 << 63, 1 << 63), (2, u64::MAX - 1)] {
        let region = refusal(|extension| {
            (extension.regions[0].addr, extension.regions[0].length) = (addr, length)
        });
        assert_eq!(region, SegmentError::Extent { what: "region", index: 0, addr, length });
        let base = refusal(|extension| {
            (extension.allocations[0].base, extension.allocations[0].length) = (addr, length);
        });
        assert_eq!(base, SegmentError::Extent { what: "allocation", index: 0, addr, length });
        let stock = STOCK
            .replace("140000000000000", &addr.to_string())
            .replace("1048576", &length.to_string());
        assert_eq!(
            parse(stock.as_bytes()),
            Err(SegmentError::Extent { what: "buffer", index: 0, addr, length })
        );
    }
}

#[test]
fn regions_outside_their_allocation_are_refused() {
    for (addr, length) in
        [(0xfff, 1), (0xfff, 2), (0x1000, 0x1001), (0x1fff, 2), (0x2000, 1), (1, u64::MAX - 1)]
    {
        let error = refusal(|extension| {
            (extension.regions[0].addr, extension.regions[0].length) = (addr, length)
        });
        assert!(
            matches!(error, SegmentError::OutsideAllocation { index: 0, .. }),
            "{addr:#x}+{length:#x}: {error}"
        );
    }
    let error = refusal(|extension| extension.regions[0].id = 8);
    assert!(matches!(error, SegmentError::UnknownAllocation { index: 0, id: 8, .. }), "{error}");
    let error = refusal(|extension| extension.allocations.push(extension.allocations[0]));
    assert!(matches!(error, SegmentError::Duplicate { id: 7, .. }), "{error}");
}

#[test]
fn what_the_batch_protocol_needs_has_these_bytes_and_survives_them() {
    let mut batched = descriptor();
    let extension = batched.kvferry.as_mut().unwrap();
    extension.batch = Some(BatchPort { port: 16022, major: 1, minor: 0, authenticated: true });
    extension.regions[0].segment = Some(SegmentRef { segment: 3, generation: 9 });
    let json = encode(&batched).unwrap();
    let text = String::from_utf8(json.clone()).unwrap();
    let region = r#","id":7,"segment":{"segment":3,"generation":9}}],"#;
    let port = r#""batch":{"port":16022,"major":1,"minor":0,"authenticated":true}}}"#;
    assert!(text.ends_with(&(region.to_string() + port + "\n")), "{text}");
    assert_eq!(parse(&json), Ok(batched));
    let error = refusal(|extension| {
        extension.regions[0].segment = Some(SegmentRef { segment: 3, generation: 9 });
        extension.regions.push(Region { addr: 0x1000, ..extension.regions[0] });
    });
    assert_eq!(error, SegmentError::DuplicateSegment { segment: 3 });
}

#[test]
fn the_buffers_of_tcp_are_those_that_say_so_or_all() {
    let several = parse(
        br#"{"name":"a:1","protocol":["hip","tcp"],"future":{"x":[1]},"buffers":[
        {"name":"hip:0","addr":1,"length":2,"protocol":"hip","shm_name":"00"},
        {"name":"a:1","addr":5,"length":2,"protocol":"tcp","rkey":[1]}]}"#,
    )
    .unwrap();
    assert_eq!(several.tcp_buffers().map(|buffer| buffer.addr).collect::<Vec<_>>(), [5]);
    assert_eq!(parse(STOCK.as_bytes()).unwrap().tcp_buffers().count(), 1);
    let hip = STOCK.replace("\"tcp\"", "\"hip\"");
    assert_eq!(parse(hip.as_bytes()).unwrap().tcp_buffers().count(), 0);
}

#[test]
fn a_buffer_without_a_name_is_refused() {
    let unnamed = STOCK.replace(r#"[{"name":"10.0.0.1:15428""#, r#"[{"name":"""#);
    assert_eq!(parse(unnamed.as_bytes()), Err(SegmentError::Unnamed { index: 0 }));
}

#[test]
fn too_many_entries_are_refused() {
    let error =
        refusal(|extension| extension.regions = vec![extension.regions[0]; MAX_ENTRIES + 1]);
    assert_eq!(error, SegmentError::TooMany { what: "regions", count: MAX_ENTRIES + 1 });
    let error = refusal(|extension| {
        extension.allocations = vec![extension.allocations[0]; MAX_ENTRIES + 1]
    });
    assert_eq!(error, SegmentError::TooMany { what: "allocations", count: MAX_ENTRIES + 1 });
}

#[test]
fn other_json_is_malformed() {
    for json in [
        "",
        "{}",
        "[]",
        "null",
        "{\"name\":\"a:1\"}",
        r#"{"name":"a:1","protocol":1}"#,
        r#"{"name":"a:1","protocol":"tcp","tcp_data_port":65536}"#,
        r#"{"name":"a:1","protocol":"tcp","buffers":[{"name":"a","addr":-1,"length":1}]}"#,
        r#"{"name":"a:1","protocol":"tcp","buffers":[{"name":"a","addr":1.5,"length":1}]}"#,
        r#"{"name":"a:1","protocol":"tcp","buffers":[{"name":"a","addr":18446744073709551616,"length":1}]}"#,
        r#"{"name":"a:1","protocol":"tcp","kvferry":{"version":1}}"#,
        &"[".repeat(100_000),
    ] {
        let error = parse(json.as_bytes()).unwrap_err();
        assert!(matches!(error, SegmentError::Malformed { .. }), "{json:.80}: {error}");
    }
}

proptest! {
    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
        let _ = parse(&bytes);
    }

    #[test]
    fn a_damaged_descriptor_never_panics(position in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut json = encode(&descriptor()).unwrap();
        let position = position.index(json.len());
        json[position] = byte;
        let _ = parse(&json);
    }
}
