use super::*;
use crate::test_device::device;

fn file(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    std::fs::write(&path, bytes).unwrap();
    (directory, path)
}

fn with_header(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

#[test]
fn damaged_and_hostile_headers_are_errors_that_name_the_file() {
    let info =
        |shape: &str, offsets: &str| format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#);
    let cases: &[(&str, Vec<u8>)] = &[
        ("empty", vec![]),
        ("seven bytes", vec![1; 7]),
        ("a header of 2^64-1 bytes", u64::MAX.to_le_bytes().to_vec()),
        ("a header longer than the file", with_header("{}", 0)[..9].to_vec()),
        ("a header longer than any T5's", with_header(&format!("{{}}{}", " ".repeat(2 << 20)), 0)),
        ("no JSON", with_header("{\"a\":", 0)),
        ("an array", with_header("[]", 0)),
        ("binary", with_header("\u{1}\u{2}", 4)),
        ("deep nesting", with_header(&"[".repeat(100_000), 0)),
        ("data cut short", with_header(&info("[2]", "[0,8]"), 4)),
        ("data too long", with_header(&info("[2]", "[0,8]"), 12)),
        ("a shape that overflows", with_header(&info("[4294967296,4294967296,16]", "[0,8]"), 8)),
        ("a shape of 2^62 elements", with_header(&info("[4611686018427387904]", "[0,18446744073709551615]"), 8)),
        ("offsets backwards", with_header(&info("[2]", "[8,0]"), 8)),
        ("a gap", with_header(&info("[2]", "[4,12]"), 12)),
        ("a negative size", with_header(&info("[-2]", "[0,8]"), 8)),
        ("an unknown dtype", with_header(r#"{"a":{"dtype":"Q7","shape":[2],"data_offsets":[0,8]}}"#, 8)),
    ];
    for (what, bytes) in cases {
        let (_directory, path) = file(bytes);
        let error = Reader::open(&path).expect_err(what).to_string();
        assert!(error.contains("x.safetensors: not a usable safetensors file: "), "{what}: {error}");
    }
}

#[test]
fn bytes_are_deterministic_and_wider_dtypes_come_first() {
    let directory = tempfile::tempdir().unwrap();
    let narrow = Tensor::new(&[[1.5f32, -2.0, 3.25]], &device()).unwrap().to_dtype(DType::BF16).unwrap();
    let wide = Tensor::new(&[0.1f64], &device()).unwrap();
    let tensors = [("narrow", &narrow), ("wide", &wide)];
    let bytes = |name: &str| {
        let path = directory.path().join(name);
        write(&path, &tensors, &[("format", "pt"), ("b", "2"), ("a", "1")]).unwrap();
        std::fs::read(&path).unwrap()
    };
    let first = bytes("one");
    assert_eq!(first, bytes("two"));
    assert_eq!(&first[first.len() - 6..], [0xc0, 0x3f, 0x00, 0xc0, 0x50, 0x40]);
    let reader = Reader::open(&directory.path().join("one")).unwrap();
    assert_eq!(reader.names(), ["wide", "narrow"]);
    assert_eq!(reader.read("wide", DType::F64, &device()).unwrap().to_vec1::<f64>().unwrap(), [0.1]);
    assert!(reader.equals("narrow", &narrow).unwrap());
    assert!(!reader.equals("narrow", &narrow.affine(2.0, 0.0).unwrap()).unwrap());
}

// The host alone: stored tensors are compared there.
#[test]
fn stored_tensors_are_equal_that_have_the_same_values_in_the_dtype_that_they_are_read_in() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("both");
    // More rows than are compared at a time.
    let one = Tensor::randn(0f32, 1.0, (3000, 16), &Device::Cpu).unwrap();
    let other = (one.to_dtype(DType::BF16).unwrap(), (&one + 1.0).unwrap());
    let last = Tensor::cat(&[&one.narrow(0, 0, 2999).unwrap(), &other.1.narrow(0, 2999, 1).unwrap()], 0).unwrap();
    let long = Tensor::cat(&[&one, &one], 0).unwrap();
    write(&path, &[("one", &one), ("same", &one), ("last", &last), ("long", &long), ("narrow", &other.0)], &[])
        .unwrap();
    let reader = Reader::open(&path).unwrap();
    let equal = |name, dtype| are_equal([(&reader, "one"), (&reader, name)], dtype).unwrap();
    assert!(equal("same", DType::F32) && equal("narrow", DType::BF16));
    assert!(!equal("narrow", DType::F32) && !equal("last", DType::F32) && !equal("long", DType::F32));
}

#[test]
fn a_tensor_larger_than_a_piece_comes_back_bit_by_bit() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("large.safetensors");
    let large = Tensor::arange(0f32, (PIECE_BYTES as f32) * 0.6, &device()).unwrap();
    write(&path, &[("large", &large)], &[]).unwrap();
    let back = Reader::open(&path).unwrap().read("large", DType::F32, &device()).unwrap();
    assert_eq!(large.to_vec1::<f32>().unwrap(), back.to_vec1::<f32>().unwrap());
}

#[test]
fn values_that_are_not_finite_are_neither_read_nor_written_and_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x.safetensors");
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            // Near the end of a long tensor: all of its pieces are looked at.
            let mut values = vec![1f32; CHECKED_BYTES + 3];
            let place = values.len() - 2;
            let of = |values: &[f32]| Tensor::new(values, &device()).unwrap().to_dtype(dtype).unwrap();
            write(&path, &[("a", &of(&[2.0])), ("b", &of(&values))], &[]).unwrap();
            Reader::open(&path).unwrap().check_finite("b").unwrap();
            values[place] = value;
            let refused = write(&path, &[("a", &of(&[2.0])), ("b", &of(&values))], &[]).unwrap_err();
            assert!(matches!(&refused, Error::NotFiniteToSave { tensor, .. } if tensor == "b"), "{refused}");
            // As another program writes it.
            let bytes = of(&values).flatten_all().unwrap();
            let tensors = std::collections::HashMap::from([("b".to_owned(), bytes)]);
            candle_core::safetensors::save(&tensors, &path).unwrap();
            let reader = Reader::open(&path).unwrap();
            let is_named = |found: Result<()>| {
                let error = found.unwrap_err();
                assert!(matches!(&error, Error::NotFinite { tensor, .. } if tensor == "b"), "{dtype:?}: {error}");
            };
            is_named(reader.check_finite("b"));
            is_named(reader.read("b", DType::F32, &device()).map(drop));
            is_named(reader.read_rows("b", place, 1, DType::F32).map(drop));
            reader.read_rows("b", 0, place, DType::F32).unwrap();
        }
    }
}
