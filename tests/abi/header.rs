//! The header against the library: a C compiler compares every structure, function and number.

use std::collections::BTreeSet;
use std::ffi::{c_char, c_void};
use std::fmt::Write;
use std::mem::offset_of;
use std::process::Command;

use kvferry::Path;
use kvferry::abi::types::*;
use kvferry::abi::{Api, numbers};
use kvferry_device::conformance::skip;

const HEADER: &str = include_str!("../../include/kvferry.h");

/// What a Rust type is called in C.
trait InC {
    fn in_c() -> String;
}

macro_rules! in_c {
    ($($rust:ty => $c:literal)*) => {$(
        impl InC for $rust {
            fn in_c() -> String {
                $c.into()
            }
        }
    )*};
}

in_c! {
    c_void => "void"
    c_char => "char"
    u8 => "uint8_t"
    i32 => "int32_t"
    u32 => "uint32_t"
    u64 => "uint64_t"
    usize => "size_t"
    TargetHandle => "kvferry_target"
    BatchHandle => "kvferry_batch"
    Config => "kvferry_config"
    RangeEntry => "kvferry_range"
    Strided => "kvferry_strided"
    Pages => "kvferry_pages"
    Paged => "kvferry_paged"
    Request => "kvferry_request"
    SubmitOptions => "kvferry_submit_options"
    BatchStatus => "kvferry_batch_status"
    PathStatistics => "kvferry_path_statistics"
    Statistics => "kvferry_statistics"
    Api => "kvferry_api"
}

impl<T: InC> InC for *const T {
    fn in_c() -> String {
        format!("{} const *", T::in_c())
    }
}

impl<T: InC> InC for *mut T {
    fn in_c() -> String {
        format!("{} *", T::in_c())
    }
}

/// An array is a pointer where it is used; the sizes of structures tell how long it is.
impl<T: InC, const N: usize> InC for [T; N] {
    fn in_c() -> String {
        format!("{} *", T::in_c())
    }
}

macro_rules! functions_in_c {
    ($($($argument:ident)*;)*) => {$(
        impl<R: InC, $($argument: InC),*> InC for unsafe extern "C" fn($($argument),*) -> R {
            fn in_c() -> String {
                let arguments = [$($argument::in_c()),*].join(", ");
                format!("{} (*)({arguments})", R::in_c())
            }
        }
    )*};
}

functions_in_c! { A; A B; A B C; A B C D; A B C D E; A B C D E F; }

fn field_in_c<T, F: InC>(_: fn(&T) -> &F) -> String {
    F::in_c()
}

fn assert_in_c(source: &mut String, condition: &str, what: &str) {
    let _ = writeln!(source, "_Static_assert({condition}, \"{what}\");");
}

/// Fields are named as in Rust, and as in C where that differs.
macro_rules! assert_structures {
    ($out:ident, $($rust:ident { $($field:ident $(as $in_c:ident)?),* $(,)? })*) => {$(
        // A field that is not listed does not compile.
        let _ = |$rust { $($field: _),* }: $rust| ();
        let name = $rust::in_c();
        let (size, alignment) = (size_of::<$rust>(), align_of::<$rust>());
        assert_in_c($out, &format!("sizeof({name}) == {size}"), &name);
        assert_in_c($out, &format!("_Alignof({name}) == {alignment}"), &name);
        $(
            let field = [$(stringify!($in_c),)? stringify!($field)][0];
            let what = format!("{name}.{field}");
            let offset = offset_of!($rust, $field);
            assert_in_c($out, &format!("offsetof({name}, {field}) == {offset}"), &what);
            let of_type = field_in_c(|it: &$rust| &it.$field);
            let same = format!("_Generic((({name} *)0)->{field}, {of_type}: 1, default: 0)");
            assert_in_c($out, &same, &what);
        )*
    )*};
}

/// Hands the header and what is said of it to the C compiler; its complaints, if there is one.
fn compile(claims: &str) -> Option<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("header.c");
    std::fs::write(&file, format!("#include \"kvferry.h\"\n{claims}")).expect("a file");
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
    let compiled =
        Command::new("cc").args(["-std=c11", "-fsyntax-only", "-I", include]).arg(&file).output();
    match compiled {
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => {
            skip("cxx", &error);
            None
        }
    }
}

fn assert_compiles(claims: &str) {
    if let Some(complaints) = compile(claims) {
        assert!(complaints.is_empty(), "{complaints}");
    }
}

#[test]
fn the_headers_structures_and_functions_are_the_librarys() {
    let mut claims = String::new();
    let out = &mut claims;
    assert_structures! { out,
        TargetHandle { engine, id }
        BatchHandle { engine, id }
        Config { struct_size, devices, listen, name, batch_listen, settings, settings_count }
        RangeEntry { local, remote, len as length }
        Strided { local, remote, length, count, local_stride, remote_stride }
        Pages { address, numbers, count, page_stride, layer_stride, row_stride }
        Paged { local, remote, layers, rows, row_bytes }
        Request { opcode, reserved, source, target, offset, length }
        SubmitOptions {
            struct_size, producer_kind, without_kernel, producer, offload_mode, reserved, behind,
            behind_count,
        }
        BatchStatus { struct_size, state, path, bytes, failure, reserved }
        PathStatistics { completed, failed, cancelled, bytes }
        Statistics {
            struct_size, pinned_bytes, staging_bytes, rejected_connections, fallbacks, refused,
            running, regions, registered_bytes, mappings, mapped_peers, bounce_bytes, locked_bytes,
            paths,
        }
        Api {
            struct_size, abi_version, reserved, version, last_error, create, destroy, name, device,
            register_memory, unregister_memory, allocate, free, open, import_segment,
            export_segment, refresh, close, submit_ranges, submit_strided, submit_paged,
            submit_requests, poll, wait, signal, release, event_descriptor, statistics, cancel,
            record_step,
        }
    }
    let paths = Path::ALL.len();
    let counted = "sizeof ((kvferry_statistics *)0)->paths / sizeof(kvferry_path_statistics)";
    assert_in_c(out, &format!("{counted} == {paths}"), "paths");
    for (named, plain) in [("status", Status::in_c()), ("engine", EngineHandle::in_c())] {
        let same = format!("_Generic((kvferry_{named})0, {plain}: 1, default: 0)");
        assert_in_c(out, &same, named);
    }
    let load = "_Generic(kvferry_load, const kvferry_api *(*)(uint32_t): 1, default: 0)";
    assert_in_c(out, load, "kvferry_load");
    assert_compiles(&claims);
}

/// Names that the header gives numbers: of its enumerators, and of its macros that have a value.
fn named_numbers() -> BTreeSet<&'static str> {
    let named = |line: &'static str| {
        let line = line.trim_start_matches("#define ").trim_start_matches("enum { ");
        let names = line.split(", ").filter_map(|one| one.trim().split([' ', '=']).next());
        names.filter(|name| name.starts_with("KVFERRY_")).collect::<Vec<_>>()
    };
    let gives = |line: &&str| line.starts_with("#define KVFERRY_ABI") || line.contains(" = ");
    HEADER.lines().filter(gives).flat_map(named).collect()
}

#[test]
fn the_headers_numbers_are_the_librarys() {
    let in_library: BTreeSet<_> = numbers::ALL.iter().map(|(name, _)| *name).collect();
    assert_eq!(named_numbers(), in_library);
    let mut claims = String::new();
    for (name, value) in numbers::ALL {
        assert_in_c(&mut claims, &format!("{name} == {value}"), name);
    }
    assert_compiles(&claims);
}

/// The claims above are of a kind that a compiler refuses if they are wrong.
#[test]
fn a_wrong_claim_about_the_header_does_not_compile() {
    for wrong in [
        "sizeof(kvferry_target) == 8",
        "_Generic(((kvferry_api *)0)->destroy, int32_t (*)(uint32_t): 1, default: 0)",
        "_Generic(((kvferry_api *)0)->wait, int32_t (*)(kvferry_batch, uint64_t, \
         kvferry_batch_status const *): 1, default: 0)",
        "_Generic(((kvferry_batch_status *)0)->failure, uint32_t: 1, default: 0)",
        "KVFERRY_PATH_STAGED == 6",
    ] {
        let mut claim = String::new();
        assert_in_c(&mut claim, wrong, "wrong");
        if let Some(complaints) = compile(&claim) {
            assert!(complaints.contains("static assertion failed"), "{wrong}: {complaints}");
        }
    }
}
