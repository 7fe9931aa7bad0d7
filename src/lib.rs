//! kvferry moves LLM KV cache between GPUs, and between GPUs and host memory.
pub use kvferry_engine::*;
