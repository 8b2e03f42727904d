//! `merge` with adapters and models of PEFT and transformers.

use crate::run::{Scene, repository};

#[test]
fn merge_writes_a_model_beside_its_tokenizer_and_replaces_nothing_unasked() {
    let scene = Scene::new();
    let goldens = repository().join("crates/t5/tests/goldens/adapters");
    let copy = |from: &str, to: &str| {
        std::fs::create_dir_all(scene.path(to)).expect("a directory");
        for entry in std::fs::read_dir(goldens.join(from)).expect("goldens") {
            let path = entry.expect("an entry").path();
            std::fs::copy(&path, scene.path(to).join(path.file_name().expect("a name"))).expect("a copy");
        }
    };
    copy("bases/gated_untied", "bases/gated_untied");
    copy("dora/final", "adapter");
    scene.write("bases/gated_untied/spiece.model", "pieces");
    // The base is the one that adapter_config.json names.
    let merge = |more: &[&str]| scene.run(&[&["merge", "--adapter", "adapter", "-o", "merged"], more].concat());
    let json = merge(&["--json"]).expect_code(0).json();
    assert_eq!((json["linears"].as_u64(), json["replaced"].as_u64()), (Some(25), Some(0)), "{json}");
    let files = ["config.json", "generation_config.json", "model.safetensors", "spiece.model"];
    assert_eq!(scene.names("merged"), files);
    merge(&[]).expect_code(2).expect_words(&["merged already exists", "`--force`"]);
    merge(&["--force", "--dtype", "bf16"]).expect_code(0).expect_words(&["25 linear layers merged", "peak"]);
    let onto = |output: &str| scene.run(&["merge", "--adapter", "adapter", "--force", "--output", output]);
    onto("adapter").expect_code(2).expect_words(&["has the model or the adapter in it"]);
    onto("bases").expect_code(2).expect_words(&["has the model or the adapter in it"]);
    merge(&["--force", "--model", "adapter"]).expect_code(4);
    scene
        .run(&["merge", "--adapter", "bases/gated_untied", "-o", "b"])
        .expect_code(4)
        .expect_words(&["not an adapter"]);
    assert_eq!(scene.names("."), ["adapter", "bases", "merged"], "a refusal leaves nothing");
}
