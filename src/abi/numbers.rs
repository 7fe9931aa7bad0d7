//! The numbers that `include/kvferry.h` names, as the library uses them; a test compares the two.

use super::types::Status;

macro_rules! numbers {
    ($($name:ident: $type:ty = $value:expr;)*) => {
        $(pub const $name: $type = $value;)*

        /// All of them, by their names in the header.
        pub const ALL: &[(&str, i64)] = &[$((concat!("KVFERRY_", stringify!($name)), $name as i64)),*];
    };
}

numbers! {
    ABI_VERSION: u32 = 1;

    OK: Status = 0;
    INVALID_ARGUMENT: Status = 1;
    NOT_FOUND: Status = 2;
    BUSY: Status = 3;
    BAD_SETTING: Status = 4;
    UNREACHABLE: Status = 5;
    PEER_LOST: Status = 6;
    DEVICE_ERROR: Status = 7;
    OUT_OF_MEMORY: Status = 8;
    REFUSED: Status = 9;
    SYSTEM: Status = 10;
    FORKED: Status = 11;
    INTERNAL: Status = 12;
    CANCELLED: Status = 13;

    READ: u32 = 0;
    WRITE: u32 = 1;

    NO_PRODUCER: u32 = 0;
    STREAM: u32 = 1;
    EVENT: u32 = 2;

    OFFLOAD_AUTO: u32 = 0;
    OFFLOAD_DIRECT: u32 = 1;
    OFFLOAD_KERNEL: u32 = 2;
    OFFLOAD_STAGED: u32 = 3;

    RUNNING: u32 = 0;
    COMPLETED: u32 = 1;
    FAILED: u32 = 2;

    PATH_NONE: u32 = 0;
    PATH_KERNEL: u32 = 1;
    PATH_DMA: u32 = 2;
    PATH_MIXED: u32 = 3;
    PATH_MEMCPY: u32 = 4;
    PATH_TCP: u32 = 5;
    PATH_TCP_STAGED: u32 = 6;
    PATH_STAGED: u32 = 7;
}
