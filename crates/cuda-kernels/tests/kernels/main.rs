//! Each kernel on the emulated card against the same operation of `t5-ops` or of candle on the CPU, in every schedule.
#![cfg(not(feature = "ptx"))]

mod attention;
mod candle;
mod card;
mod cross_entropy;
mod decoding;
mod dequantise;
mod dropout;
mod norm;
mod optimizer;
mod rows;
mod small_m;
