//! Attacks on what outlives a command: files of answers that go on, and directories of caches.

use super::{Attack, RUN, exchange};

/// Answers to rows of which the last is broken, so that it ends with an unfinished file.
const BROKEN_ANSWERS: &str =
    "generate --model MODEL --input BROKEN --prompt-column prompt --max-new-tokens 2 --output SHARED/x.jsonl";

/// A file of answers with which root goes on. Its name is known once the first command has ended.
pub fn answers() -> Vec<Attack> {
    let attack = |name: &str, before: &str| {
        let before = before.replace("PARTIAL", "$(ls | grep partial)");
        Attack::new(name, before, BROKEN_ANSWERS).after(BROKEN_ANSWERS)
    };
    let rows = r#"{"prompt":"0","response":"false"}"#;
    let planted = format!("f=PARTIAL; rm -f $f; echo '{rows}' > $f");
    vec![
        attack("a link", "f=PARTIAL; rm -f $f; ln -s VICTIM/precious $f").in_their_directory(),
        attack("a pipe", "f=PARTIAL; rm -f $f; mkfifo $f").in_their_directory(),
        attack("a directory", "f=PARTIAL; rm -f $f; mkdir $f").in_their_directory(),
        attack("a file of theirs", &planted).in_their_directory(),
        // The names of root's files stay, because the directory is sticky.
        attack("a second name", "ln PARTIAL x.jsonl.0.partial || true"),
        attack("a link for the whole file", "ln -s VICTIM/precious x.jsonl"),
        attack("a lock that is held", "true").meanwhile("exec flock $(ls | grep partial) sleep 60").refused("error: "),
        attack("exchanged", "true").in_their_directory().meanwhile(
            "f=$(ls | grep partial); while :; do mv $f y 2>/dev/null && ln -s VICTIM/precious $f; rm -f $f; mv y $f 2>/dev/null; done",
        ),
    ]
}

/// Directories of caches, which a variable names: that of measured speeds, and Hugging Face's.
pub fn caches() -> Vec<Attack> {
    let measuring = format!("XDG_CACHE_HOME=SHARED/cache LOW_MEM_T5_PRICES=measured {RUN}");
    let (ours, file) = ("mkdir -m 777 -p cache/train_low_mem; chmod 777 cache", "cache/train_low_mem/speed.json");
    let mut attacks = vec![
        Attack::new("speeds: a link on the way", "ln -s VICTIM cache", measuring.clone()),
        Attack::new(
            "speeds: a link for the directory",
            "mkdir -m 777 cache; ln -s VICTIM cache/train_low_mem",
            &*measuring,
        ),
        Attack::new("speeds: an exchanged directory", ours, &*measuring)
            .in_their_directory()
            .meanwhile(exchange("cache/train_low_mem", "cache/y")),
    ];
    for plant in ["ln -s VICTIM/precious", "mkfifo", "touch", "mkdir"] {
        let before = format!("{ours}; {plant} {file}");
        attacks.push(Attack::new(format!("speeds: {plant}"), before, &*measuring));
    }
    let hub =
        "r=hub/models--a--b; mkdir -p $r/refs $r/snapshots/x; echo x > $r/refs/main; cp MODEL/model/* $r/snapshots/x";
    let link = "is a symbolic link of user 65534";
    for (command, variable) in [
        ("generate --model a/b --prompt a --max-new-tokens 2", "HF_HUB_CACHE=SHARED/hub"),
        ("chat --model a/b", "HF_HOME=SHARED"),
        ("export --model a/b --format gguf --output SHARED/x.gguf", "HF_HUB_CACHE=SHARED/hub"),
    ] {
        let command = format!("{variable} {command}");
        for file in ["config.json", "model.safetensors", "tokenizer.json"] {
            let before = format!("{hub}; cd $r/snapshots/x; rm {file}; ln -s VICTIM/copy/{file} {file}");
            attacks.push(Attack::new(format!("hub: {file}: {command}"), before, &*command).refused(link));
        }
        for (plant, why) in [
            ("rm $r/refs/main; ln -s VICTIM/precious $r/refs/main", ""),
            ("rm $r/refs/main; mkfifo $r/refs/main", ""),
            ("rm -r $r/snapshots/x; ln -s VICTIM/copy $r/snapshots/x", link),
            ("rm -r $r/snapshots; ln -s VICTIM $r/snapshots", "error: "),
        ] {
            let attack = Attack::new(format!("hub: {plant}: {command}"), format!("{hub}; {plant}"), &*command);
            attacks.push(if why.is_empty() { attack } else { attack.refused(why) });
        }
    }
    attacks
}
