//! [`VectorWriter`]: writes vectors of one length as a parquet file with a column of lists of floats, in little memory.

use std::io::{self, Write};
use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as PhysicalType};
use parquet::data_type::FloatType;
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties, WriterVersion};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;

use crate::parquet_writer::io_error;

/// Bytes of values after which a row group ends.
pub const VECTOR_GROUP_BYTES: u64 = 2 << 20;

/// Writes vectors. Memory holds the values of one row group, and the pages that are made of them.
pub struct VectorWriter<W: Write + Send> {
    file: SerializedFileWriter<W>,
    width: usize,
    values: Vec<f32>,
}

impl<W: Write + Send> VectorWriter<W> {
    /// Begins a file whose column has this name. Each vector has `width` numbers.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn new(out: W, column: &str, width: usize) -> io::Result<Self> {
        let file = Self::begin(out, column).map_err(io_error)?;
        Ok(Self { file, width, values: Vec::new() })
    }

    fn begin(out: W, column: &str) -> Result<SerializedFileWriter<W>, ParquetError> {
        let group = |name: &str, repetition, field, logical| {
            let group = Type::group_type_builder(name).with_repetition(repetition).with_fields(vec![Arc::new(field)]);
            group.with_logical_type(logical).build()
        };
        let element = Type::primitive_type_builder("element", PhysicalType::FLOAT);
        let element = element.with_repetition(Repetition::REQUIRED).build()?;
        let list = group("list", Repetition::REPEATED, element, None)?;
        let column = group(column, Repetition::REQUIRED, list, Some(LogicalType::List))?;
        let schema = Type::group_type_builder("schema").with_fields(vec![Arc::new(column)]).build()?;
        let properties = WriterProperties::builder()
            .set_writer_version(WriterVersion::PARQUET_2_0)
            .set_created_by(concat!("train_low_mem ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_dictionary_enabled(false)
            .set_statistics_enabled(EnabledStatistics::None);
        SerializedFileWriter::new(out, Arc::new(schema), Arc::new(properties.build()))
    }

    /// Writes a vector.
    ///
    /// # Errors
    /// Errors of the file.
    ///
    /// # Panics
    /// The vector has another length.
    pub fn write(&mut self, vector: &[f32]) -> io::Result<()> {
        assert_eq!(vector.len(), self.width, "vectors of one length");
        self.values.extend_from_slice(vector);
        let is_full = size_of_val(self.values.as_slice()) as u64 >= VECTOR_GROUP_BYTES;
        if is_full { self.finish_group().map_err(io_error) } else { Ok(()) }
    }

    fn finish_group(&mut self) -> Result<(), ParquetError> {
        if self.values.is_empty() {
            return Ok(());
        }
        let mut group = self.file.next_row_group()?;
        let mut column = group.next_column()?.expect("the schema has one column");
        // Each number belongs to the vector before it, except the first of a vector.
        let repetitions: Vec<i16> = (0..self.values.len()).map(|at| i16::from(at % self.width != 0)).collect();
        let definitions = vec![1; self.values.len()];
        column.typed::<FloatType>().write_batch(&self.values, Some(&definitions), Some(&repetitions))?;
        column.close()?;
        group.close()?;
        self.values.clear();
        Ok(())
    }

    /// Writes the remaining vectors and the footer.
    ///
    /// # Errors
    /// Errors of the file.
    pub fn finish(mut self) -> io::Result<()> {
        self.finish_group().map_err(io_error)?;
        self.file.into_inner().map_err(io_error)?.flush()
    }
}
