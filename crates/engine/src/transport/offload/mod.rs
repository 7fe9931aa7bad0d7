//! Between a GPU's memory and host memory that it reaches.

mod steps;

pub(super) use steps::Steps;
