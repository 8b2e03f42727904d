//! The model beside the trained one, which is only read, and the pass in which a teacher reads a batch.
//!
//! A teacher reads each micro-batch before the step, and its decoder's output is kept until the micro-batch's loss. There its head makes
//! logits of some rows at a time, beside the student's. So logits never exist whole.

use std::rc::Rc;

use candle_core::Tensor;
use t5::T5;

use super::{Batch, Trainer, gather};
use crate::error::{Error, Result};

impl Trainer {
    /// Puts a model beside the trained one, which is only read: the reference of [`crate::preference::Preference::has_reference_model`], or
    /// the teacher of [`crate::TrainerOptions::distillation`].
    /// Its weights may lie in files. Called before the first step.
    ///
    /// # Errors
    /// [`Error::InvalidOption`]: it has other entries in its vocabulary, or computes elsewhere.
    pub fn compare_with(&mut self, frozen: T5) -> Result<()> {
        let [own, others] = [&self.model, &frozen].map(|model| (model.config().vocab_size, model.device().is_cpu()));
        if own != others {
            let words =
                |(entries, is_cpu)| format!("{entries} entries {}", if is_cpu { "on the CPU" } else { "on a device" });
            return Err(Error::invalid_option("a frozen model", &words(own), words(others)));
        }
        self.frozen = Some(Rc::new(frozen));
        Ok(())
    }

    /// The model beside the trained one.
    pub fn frozen(&self) -> Option<&Rc<T5>> {
        self.frozen.as_ref()
    }

    /// The teacher's states of each micro-batch of a batch of this process; `None` if `interrupted` returned true.
    pub(crate) fn teacher_states(
        &self,
        batch: &Batch,
        (cut, first_sample): (&[Vec<usize>], usize),
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Tensor>>> {
        let expected = "a model that the student learns from";
        let teacher = self.frozen().ok_or_else(|| Error::invalid_option("distill.teacher", expected, "none"))?;
        let states = cut.iter().map(|samples| {
            let micro_batch = gather(batch, samples, first_sample, self.model())?;
            Ok(teacher.states(&micro_batch, self.options().precision.activations(), interrupted)?)
        });
        states.collect()
    }
}
