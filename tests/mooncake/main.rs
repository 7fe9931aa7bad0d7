//! Interoperation with stock Mooncake: its PyPI wheel in a process of its own, on host memory, both
//! ways, in both versions of the framing. Every byte of both buffers is compared, those between the
//! pieces included.
//!
//! ci/mooncake.sh installs the wheel; without it each test prints SKIP, and
//! `KVFERRY_TEST_REQUIRE=mooncake` makes that a failure.

mod begins;
mod here;
mod relay;
mod serves;
mod stock;
