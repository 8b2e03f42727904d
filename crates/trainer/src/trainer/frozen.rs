//! The model beside the trained one, which is only read, and the pass in which a teacher reads a batch.
//!
//! A teacher reads each micro-batch before the step, and its decoder's output is kept until the micro-batch's loss. There its head makes
//! logits of some rows at a time, beside the student's. So logits never exist whole.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::Tensor;
use t5::T5;
use t5_ops::TopLogits;

use super::{Batch, Trainer, gather};
use crate::error::{Error, Result};
use crate::kept_logits::{KeptLogits, Key};

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
    /// Keeps a teacher's largest logits in a file, so that it reads each sample once. Called before the first step, by every process.
    pub fn keep_logits(&mut self, kept: KeptLogits) {
        self.kept_logits = Some(RefCell::new(kept));
    }

    /// The largest logits of a teacher for each micro-batch, `count` for each position of its rectangle of targets; `None` if `interrupted`
    /// returned true.
    ///
    /// A micro-batch of which any sample is not in the file is computed whole, and then every sample is that of the file. So bits depend on
    /// the batches so far alone: not on how much of the file a killed process had written.
    pub(crate) fn teacher_logits(
        &self,
        batch: &Batch,
        (cut, first_sample): (&[Vec<usize>], usize),
        (count, chunk_rows): (usize, usize),
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<TopLogits>>> {
        let expected = "a model that the student learns from";
        let teacher = self.frozen().ok_or_else(|| Error::invalid_option("distill.teacher", expected, "none"))?;
        let activations = self.options().precision.activations();
        let compute = |samples: &[usize]| -> Result<Option<TopLogits>> {
            let micro_batch = gather(batch, samples, first_sample, self.model())?;
            let states = teacher.states(&micro_batch, activations, interrupted)?;
            Ok(states.map(|states| teacher.top_logits(&states, count, chunk_rows)).transpose()?)
        };
        let Some(kept) = &self.kept_logits else { return cut.iter().map(|samples| compute(samples)).collect() };
        let key = |&sample: &usize| Key::of_sample(&batch.sources[sample], &batch.targets[sample]);
        let longest = |samples: &[usize]| samples.iter().map(|&sample| batch.targets[sample].len()).max().unwrap_or(0);
        let (mut computed, mut records) = (Vec::new(), Vec::new());
        let mut compute_all = || -> Result<bool> {
            for samples in cut {
                let is_kept = samples.iter().map(|sample| kept.borrow().has(&key(sample)));
                if is_kept.collect::<Result<Vec<bool>>>()?.iter().all(|is_kept| *is_kept) {
                    computed.push(None);
                    continue;
                }
                let Some(logits) = compute(samples)? else { return Ok(false) };
                for (place, sample) in samples.iter().enumerate() {
                    let rows = logits.rows(place * longest(samples), batch.targets[*sample].len())?;
                    records.extend(kept.borrow().record(&key(sample), &rows)?);
                }
                computed.push(Some(logits));
            }
            Ok(true)
        };
        let is_done = compute_all();
        match self.parallel() {
            None => {
                if !is_done? {
                    return Ok(None);
                }
                kept.borrow_mut().append(&records)?;
            }
            Some(parallel) => {
                let all = self.bytes_of_all(is_done.map(|_| records))?;
                if parallel.group().rank() == 0 {
                    all.iter().try_for_each(|records| kept.borrow_mut().append(records))?;
                }
                parallel.group().barrier().map_err(Error::from)?;
                kept.borrow_mut().follow()?;
            }
        }
        let of_micro_batch = |(samples, computed): (&Vec<usize>, Option<TopLogits>)| -> Result<TopLogits> {
            let (kept, longest) = (kept.borrow(), longest(samples));
            let read = samples.iter().map(|sample| kept.read(&key(sample), batch.targets[*sample].len(), longest));
            // More samples than the run was planned with are not kept.
            match (read.collect::<Result<Option<Vec<TopLogits>>>>()?, computed) {
                (Some(samples), _) => Ok(TopLogits::concatenated(&samples)?),
                (None, Some(computed)) => Ok(computed),
                (None, None) => Err(kept.is_damaged()),
            }
        };
        cut.iter().zip(computed).map(of_micro_batch).collect::<Result<_>>().map(Some)
    }
}
