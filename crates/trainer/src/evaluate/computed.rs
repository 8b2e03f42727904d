//! [`Computed`]: a model's results for a batch, which processes send each other.

use t5::Answer;

use crate::preference::Pair;
use crate::ranking::RankedText;

/// The model's results for a batch: all that an evaluation needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Computed {
    /// Sums of token losses, one for each micro-batch.
    pub losses: Vec<f64>,
    /// An answer to each sample, where answers are generated.
    pub answers: Vec<Answer>,
    /// The log-probabilities of each sample's two answers, where they are compared.
    pub pairs: Vec<Pair>,
    /// The vectors of the rows' texts, one after the other, if the model makes vectors.
    pub vectors: Vec<f64>,
    /// The texts of lists with their scores, if the model ranks. Of rows of two texts with a score, that score.
    pub ranked: Vec<RankedText>,
}

impl Computed {
    /// Encodes the results as a message to other processes; see [`Computed::from_bytes`].
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = (self.losses.len() as u64).to_le_bytes().to_vec();
        bytes.extend(self.losses.iter().flat_map(|loss| loss.to_le_bytes()));
        bytes.extend((self.pairs.len() as u64).to_le_bytes());
        bytes.extend(self.pairs.iter().flat_map(|pair| pair.numbers()).flat_map(f64::to_le_bytes));
        bytes.extend((self.ranked.len() as u64).to_le_bytes());
        bytes.extend(self.ranked.iter().flat_map(|text| text.numbers()).flat_map(f64::to_le_bytes));
        bytes.extend((self.vectors.len() as u64).to_le_bytes());
        bytes.extend(self.vectors.iter().flat_map(|value| value.to_le_bytes()));
        for answer in &self.answers {
            bytes.extend((answer.ids.len() as u64).to_le_bytes());
            bytes.extend(answer.score.unwrap_or(f64::NAN).to_le_bytes());
            bytes.extend(answer.ids.iter().flat_map(|id| u64::from(*id).to_le_bytes()));
        }
        bytes
    }

    /// Decodes a message of [`Computed::to_bytes`]. `None` for other bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut words = bytes.as_chunks().0.iter().copied();
        let mut next = || words.next();
        let losses = (0..u64::from_le_bytes(next()?)).map(|_| Some(f64::from_le_bytes(next()?)));
        let losses = losses.collect::<Option<Vec<f64>>>()?;
        let pairs = numbers(&mut next)?.into_iter().map(Pair::from_numbers).collect();
        let ranked = numbers(&mut next)?.into_iter().map(RankedText::from_numbers).collect();
        let vectors = (0..u64::from_le_bytes(next()?)).map(|_| Some(f64::from_le_bytes(next()?)));
        let vectors = vectors.collect::<Option<Vec<f64>>>()?;
        let mut answers = Vec::new();
        while let Some(length) = next() {
            let score = Some(f64::from_le_bytes(next()?)).filter(|score| !score.is_nan());
            let ids = (0..u64::from_le_bytes(length)).map(|_| u32::try_from(u64::from_le_bytes(next()?)).ok());
            answers.push(Answer { ids: ids.collect::<Option<_>>()?, score });
        }
        Some(Self { losses, answers, pairs, vectors, ranked })
    }
}

/// Groups of N numbers, behind their number.
fn numbers<const N: usize>(next: &mut impl FnMut() -> Option<[u8; 8]>) -> Option<Vec<[f64; N]>> {
    let mut groups = Vec::new();
    for _ in 0..u64::from_le_bytes(next()?) {
        let mut numbers = [0.0; N];
        for number in &mut numbers {
            *number = f64::from_le_bytes(next()?);
        }
        groups.push(numbers);
    }
    Some(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_model_says_arrives_as_it_was_sent() {
        let answer = |ids: &[u32], score| Answer { ids: ids.to_vec(), score };
        let answers = vec![answer(&[3, 5, 1], Some(-0.1)), answer(&[], None)];
        for said in [
            Computed {
                losses: vec![0.1, f64::INFINITY],
                answers,
                pairs: vec![Pair { policy: [-1.5, -2.0], ..Pair::default() }],
                vectors: vec![0.5, -3.0],
                ranked: vec![RankedText { is_first: true, gain: 2.0, value: -0.5, score: 0.25 }],
            },
            Computed::default(),
        ] {
            assert_eq!(Computed::from_bytes(&said.to_bytes()), Some(said));
        }
        assert_eq!(Computed::from_bytes(&[9; 16]), None);
    }
}
