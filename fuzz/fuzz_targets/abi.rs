#![no_main]

#[path = "../../tests/abi/bytes.rs"]
mod bytes;
#[path = "../../tests/abi/calls.rs"]
mod calls;
#[path = "../../tests/abi/engines.rs"]
mod engines;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    bytes::calls(data);
});
