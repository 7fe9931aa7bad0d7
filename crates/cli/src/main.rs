//! The `kvferry` command: measure transfers between two processes, serve memory, and explain the
//! machine.

mod bench;
mod case;
mod chaos;
mod decode;
mod doctor;
mod endpoint;
pub mod forms;
mod interference;
pub mod layout;
mod machine;
pub mod model;
mod mooncake;
mod offload;
pub mod pattern;
mod plot;
pub mod random;
mod report;
mod room;
mod serve;
pub mod shape;
mod soak;
mod sockets;
mod store_soak;
mod transfer;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "kvferry", version, about = "Moves LLM KV cache between GPUs and host memory")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Moves named shapes, or a model's KV cache, between two processes and verifies every byte
    Bench(Box<bench::Options>),
    /// Moves random pieces in every form between two processes, or pages through a page store, for
    /// minutes, verifies each round, and fails if anything leaks
    Soak(soak::Options),
    /// Lets peers, stock Mooncake processes among them, read and write a piece of memory until
    /// SIGTERM, or until standard input closes
    Serve(serve::Options),
    /// Explains devices, the ways between them, compilers and knobs of this machine, and calibrates devices
    Doctor(doctor::Options),
    /// One of the two processes of a bench; it reads commands from standard input
    #[command(hide = true)]
    Worker(worker::Options),
    /// A decoder that prints its steps, for `bench --interference decode`
    #[command(hide = true)]
    Decoder(decode::program::Options),
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::try_from_env("KVFERRY_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let outcome = match Arguments::parse().command {
        Command::Bench(options) => bench::run(&options),
        Command::Soak(options) => soak::run(&options),
        Command::Serve(options) => serve::run(&options),
        Command::Doctor(options) => doctor::run(&options),
        Command::Worker(options) => worker::run(&options),
        Command::Decoder(options) => decode::program::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kvferry: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What a command fails with: a line for a person.
type Failure = Box<dyn std::error::Error + Send + Sync>;
