//! How values of tensors get from process to process: straight from memory, or from a card through the host.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use collective::sums::{self, Element, To};
use collective::{Group, Pending, Shards, Values, Wire};
use t5_ops::{Staged, Staging};

use crate::error::Result;

/// The way of the tensors of a device to the other processes. Every process makes the same calls in the same order.
#[derive(Clone, Debug)]
pub(crate) struct Transport {
    group: Group,
    /// Where tensors lie on a card.
    staging: Option<Staging>,
}

/// Values that processes send each other, while this one does something else.
#[derive(Debug)]
pub(crate) struct OnItsWay(Pending<Result<()>>);

impl OnItsWay {
    /// Waits until they are here.
    pub fn arrive(self) -> Result<()> {
        self.0.wait()?
    }
}

impl Transport {
    /// From memory.
    pub fn new(group: Group) -> Self {
        Self { group, staging: None }
    }

    /// From here on from a device, too.
    ///
    /// # Errors
    /// The driver's.
    pub fn reach(&mut self, device: &Device) -> Result<()> {
        self.staging = Staging::of(device)?;
        Ok(())
    }

    /// The processes.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The values of a tensor on a card; none of one in memory.
    fn staged(&self, tensor: &Tensor) -> Result<Option<OnCard>> {
        let staged = self.staging.as_ref().map(|staging| staging.stage(tensor)).transpose()?;
        Ok(staged.flatten().map(|staged| OnCard { staged, bytes: Vec::new() }))
    }

    /// Begins to add the gradient of which these are the sums of this process up over all processes, into the first of them. Until it is
    /// through nobody may look at any of them.
    pub fn begin_sum(&self, shards: Shards, parts: &[Tensor], to: To) -> Result<OnItsWay> {
        let mut on_card = parts.iter().filter_map(|part| self.staged(part).transpose()).collect::<Result<Vec<_>>>()?;
        let element = parts.first().map_or(Element::F32, |whole| element(whole.dtype()));
        let parts = parts.to_vec();
        Ok(OnItsWay(self.group.hand_over(move |wire| {
            if let [whole, rest @ ..] = on_card.as_mut_slice() {
                let rest: Vec<&OnCard> = rest.iter().collect();
                return Ok(sums::sum(wire, shards, element, (whole, &rest), to)?);
            }
            sum_in_memory(wire, (shards, element), &parts, to)
        })))
    }

    /// Begins to make a tensor everywhere what it is at process `root`. Until it is through nobody may look at it.
    pub fn begin_broadcast(&self, root: usize, tensor: &Tensor) -> Result<OnItsWay> {
        let (on_card, tensor) = (self.staged(tensor)?, tensor.clone());
        Ok(OnItsWay(self.group.hand_over(move |wire| {
            if let Some(mut values) = on_card {
                return Ok(wire.broadcast_values(root, &mut values)?);
            }
            let sent = t5_ops::change_bytes(&tensor, |bytes| wire.broadcast(root, bytes)).map_err(t5::Error::from)?;
            Ok(sent?)
        })))
    }
}

fn element(dtype: DType) -> Element {
    match dtype {
        DType::BF16 => Element::Bf16,
        DType::F64 => Element::F64,
        _ => Element::F32,
    }
}

fn sum_in_memory(wire: &Wire, (shards, element): (Shards, Element), parts: &[Tensor], to: To) -> Result<()> {
    let [whole, rest @ ..] = parts else { return Ok(()) };
    let mut summed = Ok(());
    let changed = with_bytes_of_all(rest, &[], &mut |rest| {
        t5_ops::change_bytes(whole, |whole| {
            summed = sums::sum(wire, shards, element, (whole, rest), to);
        })
    });
    changed.map_err(t5::Error::from)?;
    Ok(summed?)
}

/// Calls `f` with the bytes of all these tensors.
fn with_bytes_of_all(
    tensors: &[Tensor],
    before: &[&[u8]],
    f: &mut dyn FnMut(&[&[u8]]) -> candle_core::Result<()>,
) -> candle_core::Result<()> {
    let [first, rest @ ..] = tensors else { return f(before) };
    t5_ops::with_bytes(first, |bytes| {
        let with_first: Vec<&[u8]> = before.iter().copied().chain([bytes]).collect();
        with_bytes_of_all(rest, &with_first, f)
    })?
}

/// Values on a card, of which some are copied at a time.
struct OnCard {
    staged: Staged,
    /// Those that are copied to it.
    bytes: Vec<u8>,
}

fn failed(error: candle_core::Error) -> collective::Error {
    collective::Error::Values(error.to_string())
}

impl Values for OnCard {
    fn bytes(&self) -> usize {
        self.staged.bytes()
    }

    fn read(&self, range: Range<usize>, to: &mut Vec<u8>) -> collective::Result<()> {
        let before = to.len();
        to.resize(before + range.len(), 0);
        self.staged.read(range.start, &mut to[before..]).map_err(failed)
    }

    fn write(
        &mut self,
        range: Range<usize>,
        write: &mut dyn FnMut(&mut [u8]) -> collective::Result<()>,
    ) -> collective::Result<()> {
        self.bytes.resize(range.len(), 0);
        write(&mut self.bytes)?;
        self.staged.write(range.start, &self.bytes).map_err(failed)
    }
}
