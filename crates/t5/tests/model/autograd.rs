//! The explicit backward against candle's autograd, in f64: the same model, written a second time as a plain
//! forward over the reference operations, dropout included.

use std::collections::HashMap;

use crate::support::*;
use candle_core::{DType, Device, Tensor, Var};
use t5::{Config, Family, Lora, StepContext, T5, Targets};
use t5_ops::{Attention, Dropout, Mask, RelativePosition, reference};

/// A forward over variables; `site` numbers dropout places as the crate's documentation fixes them.
struct Plain<'a> {
    config: &'a Config,
    vars: &'a HashMap<String, Var>,
    cx: &'a StepContext,
    samples: &'a [u32],
}

impl Plain<'_> {
    fn var(&self, name: &str) -> &Tensor {
        self.vars[name].as_tensor()
    }

    fn dropout(&self, decoder: bool, block: u32, place: u32) -> Option<Dropout<'_>> {
        let &StepContext { seed, step, dropout, .. } = self.cx;
        let site = (u32::from(decoder) << 24) | (block << 4) | place;
        (dropout > 0.0).then_some(Dropout { probability: dropout as f32, seed, step, site, samples: self.samples })
    }

    fn norm(&self, x: &Tensor, name: &str) -> Tensor {
        reference::rms_norm(x, self.var(name), self.config.layer_norm_epsilon).unwrap().0
    }

    fn linear(&self, x: &Tensor, name: &str) -> Tensor {
        let y = reference::linear(x, self.var(name)).unwrap();
        let module = name.strip_suffix(".weight").unwrap();
        match self.config.lora.as_ref().and_then(|lora| Some((lora, lora.linear(module)?))) {
            Some((lora, linear)) => self.adapted(x, y, module, lora, linear.scale),
            None => y,
        }
    }

    /// PEFT's LoRA and DoRA, with W and B A as whole matrices.
    fn adapted(&self, x: &Tensor, y: Tensor, module: &str, lora: &Lora, scale: f64) -> Tensor {
        let [a, b] = ["A", "B"].map(|matrix| self.var(&format!("{module}.lora_{matrix}.weight")));
        let is_head = module == "lm_head";
        let number = match module.rsplit('.').next().unwrap() {
            "wi" | "wi_0" => 8,
            "wi_1" => 9,
            "wo" => 10,
            "lm_head" => 0,
            own => {
                ["q", "k", "v", "o"].iter().position(|linear| *linear == own).unwrap() as u32
                    + if module.contains("Enc") { 4 } else { 0 }
            }
        };
        let block = module.split('.').nth(2).map_or(0, |block| block.parse::<u32>().unwrap() + 1);
        let site = (1 << 25) | (u32::from(is_head || module.starts_with("decoder")) << 24) | (block << 4) | number;
        let &StepContext { seed, step, adapter_dropout: probability, .. } = self.cx;
        let dropout = Dropout { probability: probability as f32, seed, step, site, samples: self.samples };
        let input = reference::dropout(x, (probability > 0.0).then_some(&dropout)).unwrap();
        let added = (reference::linear(&reference::linear(&input, a).unwrap(), b).unwrap() * scale).unwrap();
        if !lora.dora {
            return (y + added).unwrap();
        }
        let is_tied_head = is_head && self.config.tie_word_embeddings;
        let weight = if is_tied_head { self.var("shared.weight") } else { self.var(&format!("{module}.weight")) };
        let whole = (weight + (b.matmul(a).unwrap() * scale).unwrap()).unwrap();
        let lengths = whole.sqr().unwrap().sum(1).unwrap().sqrt().unwrap().detach();
        let gain = (self.var(&format!("{module}.lora_magnitude_vector")) / lengths).unwrap();
        let base = reference::linear(&input, weight).unwrap();
        let adapted = (&base + added).unwrap().broadcast_mul(&gain).unwrap();
        ((y - base).unwrap() + adapted).unwrap()
    }

    fn attention(&self, x: &Tensor, source: Option<&Tensor>, layer: &str, settings: Attention) -> Tensor {
        let kind = if source.is_some() { "EncDecAttention" } else { "SelfAttention" };
        let n = self.norm(x, &format!("{layer}.layer_norm.weight"));
        let m = source.unwrap_or(&n);
        let q = self.linear(&n, &format!("{layer}.{kind}.q.weight"));
        let k = self.linear(m, &format!("{layer}.{kind}.k.weight"));
        let v = self.linear(m, &format!("{layer}.{kind}.v.weight"));
        let (out, _) = reference::attention(&q, &k, &v, &settings).unwrap();
        self.linear(&out, &format!("{layer}.{kind}.o.weight"))
    }

    fn feed_forward(&self, x: &Tensor, layer: &str, inner: Option<Dropout>) -> Tensor {
        let n = self.norm(x, &format!("{layer}.layer_norm.weight"));
        let wi = |w: &str| self.linear(&n, &format!("{layer}.DenseReluDense.{w}.weight"));
        let (gate, up) = match self.config.is_gated_act {
            true => (wi("wi_0"), Some(wi("wi_1"))),
            false => (wi("wi"), None),
        };
        let act = self.config.activation().unwrap();
        let h = reference::feed_forward_activation(&gate, up.as_ref(), act, inner.as_ref()).unwrap();
        self.linear(&h, &format!("{layer}.DenseReluDense.wo.weight"))
    }

    fn stack(&self, ids: &Tensor, lengths: &[usize], source: Option<(&Tensor, &[usize])>) -> Tensor {
        let decoder = source.is_some();
        let (name, blocks) = match decoder {
            true => ("decoder", self.config.num_decoder_layers),
            false => ("encoder", self.config.num_layers),
        };
        let relative = RelativePosition {
            buckets: self.config.relative_attention_num_buckets,
            max_distance: self.config.relative_attention_max_distance,
            bidirectional: !decoder,
        };
        let length = ids.dim(1).unwrap();
        let x = reference::embedding(ids, self.var("shared.weight"), DType::F64).unwrap();
        let mut x = reference::dropout(&x, self.dropout(decoder, 0, 0).as_ref()).unwrap();
        for block in 0..blocks {
            let number = block as u32 + 1;
            let layer = |i: usize| format!("{name}.block.{block}.layer.{i}");
            let owner = if self.config.family.has_a_table_in_every_block() { block } else { 0 };
            let table = format!("{name}.block.{owner}.layer.0.SelfAttention.relative_attention_bias.weight");
            let bias = reference::relative_bias(self.var(&table), &relative, length, length, 0).unwrap();
            let own = Attention {
                bias: Some(&bias),
                mask: Mask::causal_if(decoder),
                dropout: self.dropout(decoder, number, 2),
                ..Attention::new(self.config.num_heads, lengths)
            };
            let add = |x: &Tensor, y: &Tensor, place| {
                reference::dropout_add(x, y, self.dropout(decoder, number, place).as_ref()).unwrap()
            };
            x = add(&x, &self.attention(&x, None, &layer(0), own), 3);
            if let Some((encoded, lengths)) = source {
                let cross = Attention {
                    dropout: self.dropout(decoder, number, 4),
                    ..Attention::new(self.config.num_heads, lengths)
                };
                x = add(&x, &self.attention(&x, Some(encoded), &layer(1), cross), 5);
            }
            let inner = self.dropout(decoder, number, 6);
            x = add(&x, &self.feed_forward(&x, &layer(1 + usize::from(decoder)), inner), 7);
        }
        let n = self.norm(&x, &format!("{name}.final_layer_norm.weight"));
        reference::dropout(&n, self.dropout(decoder, 0, 1).as_ref()).unwrap()
    }

    /// The sum of the token losses.
    fn loss(&self, sources: &[Vec<u32>], targets: &[Vec<u32>]) -> Tensor {
        let lengths = |lists: &[Vec<u32>]| lists.iter().map(Vec::len).collect::<Vec<_>>();
        let (source_lengths, target_lengths) = (lengths(sources), lengths(targets));
        let start = self.config.decoder_start_token_id;
        let shifted: Vec<Vec<u32>> = targets.iter().map(|t| [&[start], &t[..t.len() - 1]].concat()).collect();
        let encoded = self.stack(&padded(sources), &source_lengths, None);
        let z = self.stack(&padded(&shifted), &target_lengths, Some((&encoded, &source_lengths)));
        let head = if self.config.tie_word_embeddings { "shared.weight" } else { "lm_head.weight" };
        let z = (z * self.config.logit_scale()).unwrap();
        let mut logits = reference::linear(&z, self.var(head)).unwrap();
        if let Some((lora, linear)) = self.config.lora.as_ref().and_then(|lora| Some((lora, lora.linear("lm_head")?))) {
            logits = self.adapted(&z, logits, "lm_head", lora, linear.scale);
        }
        let mut sum = Tensor::zeros((), DType::F64, &device()).unwrap();
        for (sample, target) in targets.iter().enumerate() {
            let logits = logits.get(sample).unwrap().narrow(0, 0, target.len()).unwrap();
            let labels = Tensor::new(target.as_slice(), &device()).unwrap().unsqueeze(1).unwrap();
            let chosen = logits.gather(&labels, 1).unwrap().sum_all().unwrap();
            let all = logits.exp().unwrap().sum(1).unwrap().log().unwrap().sum_all().unwrap();
            sum = (sum + (all - chosen).unwrap()).unwrap();
        }
        sum
    }
}

fn padded(lists: &[Vec<u32>]) -> Tensor {
    let longest = lists.iter().map(Vec::len).max().unwrap();
    let ids: Vec<u32> = lists.iter().flat_map(|l| l.iter().copied().chain(vec![0; longest - l.len()])).collect();
    Tensor::from_vec(ids, (lists.len(), longest), &device()).unwrap()
}

fn config(projection: &str, tied: bool) -> Config {
    let mut config = Config {
        vocab_size: 23,
        d_model: 10,
        d_ff: 14,
        d_kv: 3,
        num_heads: 2,
        num_layers: 2,
        num_decoder_layers: 3,
        relative_attention_num_buckets: 8,
        relative_attention_max_distance: 12,
        tie_word_embeddings: tied,
        scale_decoder_outputs: tied,
        ..Config::default()
    };
    config.set_feed_forward_proj(projection).unwrap();
    config
}

fn check(config: &Config, dropout: f64) {
    let model = T5::init(config, 11, DType::F64, &device()).unwrap();
    check_model(&model, dropout);
}

fn check_model(model: &T5, dropout: f64) {
    let config = model.config();
    let sources = [vec![3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 1], vec![5, 1], vec![9, 8, 7, 1]];
    let targets = [vec![4, 1], vec![8, 9, 10, 11, 12, 13, 14, 15, 16, 1], vec![1]];
    let adapter_dropout = config.lora.as_ref().map_or(0.0, |lora| lora.dropout);
    let cx = StepContext { dropout, adapter_dropout, ..context(13, DType::F64) };
    let samples = [4, 0, 9];
    let batch = t5::MicroBatch::new(&slices(&sources), &slices(&targets), &samples, config, &device()).unwrap();
    let (loss, grads) = gradients(model, &batch, &cx);

    let var = |p: &t5::Parameter| (p.name.clone(), Var::from_tensor(&p.tensor.copy().unwrap()).unwrap());
    let vars: HashMap<String, Var> = model.parameters().iter().map(var).collect();
    let plain = Plain { config, vars: &vars, cx: &cx, samples: &samples };
    let expected = plain.loss(&sources, &targets);
    let far = (loss / expected.to_scalar::<f64>().unwrap() - 1.0).abs();
    assert!(far < 1e-12, "loss differs by {far:e}");
    let by_autograd = (expected / 13.0).unwrap().backward().unwrap();
    assert_eq!(grads.len(), vars.len());
    // A weight below an adapter is frozen, and with DoRA its gradient is not asked for.
    let is_below = |name: &str| {
        let lora = config.lora.as_ref().filter(|lora| lora.dora);
        let module = match name.strip_suffix(".weight") {
            Some("shared") if config.tie_word_embeddings => Some("lm_head"),
            module => module,
        };
        module.is_some_and(|module| lora.is_some_and(|lora| lora.linear(module).is_some()))
    };
    for (name, grad) in grads.into_iter().filter(|(name, _)| !is_below(name)) {
        let expected = by_autograd.get(vars[&name].as_tensor()).unwrap_or_else(|| panic!("no gradient of {name}"));
        let far = distance(&grad, expected);
        assert!(far < 1e-10, "{} dropout {dropout}: gradient of {name} differs by {far:e}", config.feed_forward_proj);
    }
}

#[test]
fn the_explicit_backward_is_that_of_autograd() {
    check(&config("relu", true), 0.0);
    check(&config("gated-gelu", false), 0.0);
    check(&config("gated-silu", true), 0.0);
    check(&config("gelu", false), 0.0);
    check(&Config { family: Family::Umt5, ..config("gated-gelu", false) }, 0.0);
}

#[test]
fn the_explicit_backward_is_that_of_autograd_under_dropout() {
    check(&config("relu", true), 0.25);
    check(&config("gated-gelu", false), 0.1);
    check(&Config { family: Family::Umt5, ..config("relu", true) }, 0.1);
}

/// A model with an adapter that has left its initial values.
fn adapted(config: &Config, lora: Lora) -> T5 {
    let model = T5::init(config, 11, DType::F64, &device()).unwrap().with_adapter(lora, 7).unwrap();
    for parameter in model.parameters().iter().filter(|parameter| t5::is_of_adapter(&parameter.name)) {
        let noise =
            Tensor::randn(0f64, 0.3, parameter.tensor.shape(), &Device::Cpu).unwrap().to_device(&device()).unwrap();
        parameter.tensor.slice_set(&(&parameter.tensor + noise).unwrap(), 0, 0).unwrap();
    }
    model
}

#[test]
fn the_explicit_backward_of_adapters_is_that_of_autograd() {
    let some = Targets::Names(["q", "v", "wo"].map(str::to_owned).into());
    let head = Targets::Names(vec!["lm_head".into(), "k".into()]);
    for (dropout, dora, targets) in [
        (0.0, false, Targets::AllLinear),
        (0.3, false, some.clone()),
        (0.0, true, some),
        (0.2, true, Targets::AllLinear),
        (0.0, false, head.clone()),
        (0.3, true, head),
    ] {
        let lora = Lora { rank: 3, alpha: 5.0, dropout, dora, rslora: dora, targets, ..Lora::default() };
        check_model(&adapted(&config("relu", true), lora.clone()), 0.1);
        check_model(&adapted(&config("gated-gelu", false), lora), 0.0);
    }
}

#[test]
fn a_new_adapter_changes_no_bit_of_the_logits() {
    for dora in [false, true] {
        let model = T5::init(&relu(), 11, DType::F32, &device()).unwrap();
        let batch = micro_batch(&[vec![3, 4, 1], vec![5, 1]], &[vec![4, 1], vec![8, 9, 1]], &relu());
        let before = values(&model.logits(&batch).unwrap());
        let model = model.with_adapter(Lora { dora, ..Lora::default() }, 3).unwrap();
        let after = values(&model.logits(&batch).unwrap());
        let far = before.iter().zip(&after).fold(0f64, |far, (a, b)| far.max((a - b).abs()));
        assert!(if dora { far < 1e-6 } else { far == 0.0 }, "{far:e}");
    }
}

#[test]
fn a_pass_without_the_adapter_has_the_losses_of_the_base() {
    for (dora, targets) in
        [(false, Targets::AllLinear), (true, Targets::Names(vec!["q".into(), "wo".into(), "lm_head".into()]))]
    {
        let config = config("gated-gelu", false);
        let base = T5::init(&config, 11, DType::F64, &device()).unwrap();
        let sources = [vec![3, 4, 5, 6, 1], vec![5, 1]];
        let answers = [vec![4, 1], vec![8, 9, 10, 1]];
        let batch = micro_batch(&sources, &answers, &config);
        let cx = t5::EvalContext { activations: DType::F64, loss_chunk_rows: 3 };
        let losses = |model: &T5, batch: &t5::MicroBatch| -> Vec<f64> {
            let batches = std::slice::from_ref(batch);
            model.losses_of_samples(batches, &cx, &|| false).unwrap().expect("nobody interrupts").concat()
        };
        let expected = losses(&base, &batch);
        let model = adapted(&config, Lora { rank: 3, alpha: 5.0, dora, targets, ..Lora::default() });
        assert_ne!(losses(&model, &batch), expected);
        assert_eq!(losses(&model, &batch.without_adapter()), expected);
    }
}
