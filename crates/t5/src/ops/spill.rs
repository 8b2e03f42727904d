//! Where tensors of a step wait that are not to stay where they are computed: in files, or in the host's memory beside a device.

use candle_core::{Device, Tensor};

use super::Spill;
use super::files::{self, Files, TensorFiles};
use crate::error::Result;

/// A place for the tensors of a device.
#[derive(Debug)]
pub struct TensorSpill {
    device: Device,
    /// None: the host's memory.
    files: Option<TensorFiles>,
}

/// A tensor's place there.
#[derive(Clone, Debug)]
pub enum Stretch {
    /// In the files.
    File(files::Stretch),
    /// On the CPU.
    Memory(Tensor),
}

impl PartialEq for Stretch {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Stretch::File(one), Stretch::File(other)) => one == other,
            (Stretch::Memory(one), Stretch::Memory(other)) => one.id() == other.id(),
            _ => false,
        }
    }
}

impl TensorSpill {
    /// For tensors of a device.
    ///
    /// # Errors
    /// [`crate::Error::Offload`].
    pub fn create(files: &Files, device: &Device) -> Result<TensorSpill> {
        let in_memory = files.in_host_memory && !device.is_cpu();
        let files = (!in_memory).then(|| TensorFiles::create(files)).transpose()?;
        Ok(TensorSpill { device: device.clone(), files })
    }
}

impl Spill<Tensor> for TensorSpill {
    fn put(&mut self, x: Tensor) -> Result<Stretch> {
        let x = x.to_device(&Device::Cpu)?;
        Ok(match &mut self.files {
            Some(files) => Stretch::File(files.put(x)?),
            None => Stretch::Memory(x),
        })
    }

    fn get(&mut self, stretch: Stretch, after: Option<&Stretch>) -> Result<Tensor> {
        let after = after.and_then(|after| if let Stretch::File(stretch) = after { Some(stretch) } else { None });
        let x = match (stretch, &mut self.files) {
            (Stretch::File(stretch), Some(files)) => files.get(stretch, after)?,
            (Stretch::Memory(x), _) => x,
            (Stretch::File(_), None) => unreachable!("a tensor is got from where it was put"),
        };
        Ok(x.to_device(&self.device)?)
    }

    #[cfg(test)]
    fn written_bytes(&self) -> u64 {
        self.files.as_ref().map_or(0, TensorFiles::written_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_the_cpu_wait_in_files_whatever_is_said_of_a_device() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files { in_host_memory: true, ..Files::in_directory(directory.path()) };
        let mut spill = TensorSpill::create(&files, &Device::Cpu).unwrap();
        let x = Tensor::arange(0f32, 12.0, &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
        let put = spill.put(x.clone()).unwrap();
        assert_eq!(spill.written_bytes(), 48);
        assert_eq!(spill.get(put, None).unwrap().to_vec2::<f32>().unwrap(), x.to_vec2::<f32>().unwrap());
    }
}
