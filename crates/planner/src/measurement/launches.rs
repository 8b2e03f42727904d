//! The measurement of launches: the host's time to put a launch on the stream, and the time of graphs.

use candle_core::{DType, Device, Tensor};
use cuda_device::Replay;
use t5_ops::{linear, rms_norm, scaled};

use super::OF_A_KIND;
use super::times::{enqueued, shortest_on};
use crate::rounding::significant;
use crate::speed::{GraphTimes, LaunchTimes};

/// Launches that are timed together: fewer than the driver queues before it makes the host wait.
pub(super) const LAUNCHES: usize = 64;
/// Rows, and the width, of the products that are launched.
const PRODUCT: [usize; 2] = [8, 64];
/// Nodes of the two graphs whose times give the time of a node.
const NODES: [usize; 2] = [8, 136];
/// Graphs that are launched before the host waits for them.
const GRAPHS: usize = 8;
/// The most times that work runs before it is recorded.
const RUNS_BEFORE: usize = 8;

/// The times of launches on a card.
pub(super) fn times(device: &Device) -> candle_core::Result<LaunchTimes> {
    let x = Tensor::ones(1, DType::F32, device)?;
    let [rows, width] = PRODUCT;
    let operands =
        (Tensor::ones((rows, width), DType::F32, device)?, Tensor::ones((width, width), DType::F32, device)?);
    let kernel = enqueued(device, LAUNCHES, || scaled(&x, 0.5).map(drop))?;
    let product = enqueued(device, LAUNCHES, || linear(&operands.0, &operands.1).map(drop))?;
    let ps = |seconds: f64| significant(seconds * 1e12);
    let graph = graph(device)?.map(|[launch, node]| GraphTimes { launch_ps: ps(launch), node_ps: ps(node) });
    Ok(LaunchTimes { kernel_ps: ps(kernel), product_ps: ps(product), graph })
}

/// Seconds of the launch of a graph, and of each of its nodes; `None` if the driver cannot record.
fn graph(device: &Device) -> candle_core::Result<Option<[f64; 2]>> {
    let (Some(few), Some(many)) = (graph_of(NODES[0], device)?, graph_of(NODES[1], device)?) else { return Ok(None) };
    let node = (many - few).max(0.0) / (NODES[1] - NODES[0]) as f64;
    // A launch takes some time, whatever the two measurements say.
    Ok((node > 0.0).then(|| [(few - node * NODES[0] as f64).max(node), node]))
}

/// Seconds of a graph of `nodes` short kernels: products and norms in turn, in about the ratio of a micro-batch. The shortest kernel would
/// not be typical: on an H200 a node that scales one number takes 0.9 us. According to ncu that kernel takes 2.0 us, and a small product
/// 3.4.
fn graph_of(nodes: usize, device: &Device) -> candle_core::Result<Option<f64>> {
    let [rows, width] = PRODUCT;
    let x = Tensor::ones((rows, width), DType::F32, device)?;
    let (weight, scale) = (Tensor::ones((width, width), DType::F32, device)?, Tensor::ones(width, DType::F32, device)?);
    let mut replay = Replay::to_be_measured();
    let mut launch = || {
        let pair = |x: Tensor, _| Ok(rms_norm(&linear(&x, &weight)?, &scale, 1e-6)?.0);
        let work = |_: &Tensor| (0..nodes / 2).try_fold(x.clone(), pair);
        replay.run(&[&x], &[0], work).map(|_| replay.is_recorded())
    };
    for _ in 0..RUNS_BEFORE {
        if launch()? {
            let seconds = shortest_on(device, OF_A_KIND / 4, || (0..GRAPHS).try_for_each(|_| launch().map(drop)))?;
            return Ok(Some(seconds / GRAPHS as f64));
        }
    }
    Ok(None)
}
