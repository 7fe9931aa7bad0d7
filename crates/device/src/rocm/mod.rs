//! AMD GPUs through libamdhip64, which is opened at run time.
