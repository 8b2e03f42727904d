//! What becomes of a gradient that was handed over, and of its accumulator. The step carries it out, the count adds it up.

/// The next use of a gradient that was handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GradientDisposition {
    /// It stays.
    Keep,
    /// Its accumulator is used for the next parameter of its shape.
    Reuse,
    /// It is written to a file and read back for the update; its accumulator is used for the next parameter of its shape.
    Write,
    /// Its memory is freed.
    Free,
}

/// What becomes of the accumulator of a gradient that was handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accumulator {
    /// It holds its gradient.
    Stays,
    /// It is used for the next parameter of its shape.
    IsSpare,
    /// It is freed as soon as its gradient is copied to the host: until then its memory is not used for another gradient.
    Leaves,
    /// It is freed.
    IsFreed,
}

impl GradientDisposition {
    /// What becomes of an accumulator. `is_held`: this process applies the gradient. `copies_overlap`: gradients are copied to the host beside
    /// computation.
    pub(crate) fn accumulator(self, is_held: bool, copies_overlap: bool) -> Accumulator {
        match self {
            Self::Keep if is_held => Accumulator::Stays,
            Self::Write if copies_overlap => Accumulator::Leaves,
            Self::Keep | Self::Reuse | Self::Write => Accumulator::IsSpare,
            Self::Free => Accumulator::IsFreed,
        }
    }
}
