use super::*;

fn pairing(columns: &str) -> Result<Pairing, Unpaired> {
    let columns: Vec<String> = columns.split([' ', ',']).map(str::to_owned).collect();
    Pairing::choose(&columns, &Chosen::default())
}

#[track_caller]
fn check(columns: &str, expected: &str) {
    let pairing = pairing(columns).unwrap_or_else(|unpaired| panic!("{columns}: {unpaired:?}"));
    assert!(pairing.in_words().starts_with(expected), "{columns}: {}", pairing.in_words());
}

#[track_caller]
fn refused(columns: &str, expected: &str) {
    let words = match pairing(columns) {
        Ok(pairing) => pairing.in_words(),
        Err(Unpaired::Missing(column)) => format!("no {column}"),
        Err(Unpaired::Template(..)) => unreachable!("nothing was chosen"),
        Err(Unpaired::Question(meanings)) => {
            assert!(meanings.len() > 1 && meanings.iter().all(|meaning| !meaning.settings.is_empty()));
            meanings.iter().map(|meaning| format!("{}; ", meaning.words)).collect()
        }
    };
    assert!(words.contains(expected), "{columns}: {words}");
}

#[test]
fn a_file_says_by_its_columns_where_prompt_and_response_come_from() {
    check("response prompt id", "prompt from `prompt`, response from `response`");
    check("id messages", "chats from `messages`");
    check("conversations id", "chats from `conversations`");
    check("instruction input output", "prompt from `instruction` and `input`, response from `output`");
    check("instruction response", "prompt from `instruction`, response from `response`");
    check("prompt completion", "prompt from `prompt`, response from `completion`");
    check("question answer", "prompt from `question`, response from `answer`");
    check("text id", "text from `text`");
    check("text summary", "prompt from `text`, response from `summary`");
    refused("prompt completion label", "`label` says which answers are desirable; every answer is a target");
    refused("prompt id", "no response");
    refused("a b", "no prompt");
}

#[test]
fn a_text_with_a_class_is_a_pair_and_a_text_with_another_column_is_a_question() {
    for label in ["label", "labels", "category", "target", "class", "intent", "sentiment"] {
        check(&format!("id text {label}"), &format!("prompt from `text`, response from `{label}`"));
    }
    check("text label label_text", "prompt from `text`, response from `label_text`");
    refused("text label category", "the target is `label`; the target is `category`");
    refused(
        "text grade grade.points",
        "`text` is the source and `grade.points` the target; pretraining on `text` alone",
    );
    let grade = pairing("text grade grade.points");
    assert!(matches!(grade, Err(Unpaired::Question(meanings)) if meanings.len() == 2), "an object is no target");
    refused("text grade", "`text` is the source and `grade` the target; pretraining on `text` alone");
}

#[test]
fn columns_beside_a_pair_are_used_where_their_name_is_known() {
    check("instruction context response", "prompt from `instruction` and `context`, response");
    check("system instruction input output history", "prompt from `system`, `history`, `instruction` and `input`");
    check("system conversations", "chats from `conversations`, after `system`");
    check("prompt response system_prompt", "prompt from `system_prompt` and `prompt`");
    check("context question answer", "prompt `question: {question} context: {context}`, response from `answer`");
    check("prefix input_text target_text", "prompt `{prefix}: {input_text}`, response from `target_text`");
}

/// The columns of the text data sets that are downloaded most from Hugging Face, and how their rows are read, or why not.
#[test]
fn the_columns_of_well_known_data_sets_are_read_as_they_are_meant_or_refused() {
    for (data_set, columns, expected) in [
        ("imdb", "text,label", "prompt from `text`, response from `label`"),
        ("ag_news", "text,label", "prompt from `text`, response from `label`"),
        ("rotten_tomatoes", "text,label", "prompt from `text`, response from `label`"),
        ("yelp_review_full", "label,text", "prompt from `text`, response from `label`"),
        ("emotion", "text,label", "prompt from `text`, response from `label`"),
        ("clinc_oos", "text,intent", "prompt from `text`, response from `intent`"),
        ("SetFit", "text,label,label_text", "prompt from `text`, response from `label_text`"),
        ("financial_phrasebank", "sentence,label", "prompt from `sentence`, response from `label`"),
        ("glue sst2", "sentence,label,idx", "prompt from `sentence`, response from `label`"),
        ("glue mrpc", "sentence1,sentence2,label,idx", "prompt `sentence1: {sentence1} sentence2: {sentence2}`"),
        ("glue mnli", "premise,hypothesis,label,idx", "prompt `hypothesis: {hypothesis} premise: {premise}`"),
        ("glue qnli", "question,sentence,label,idx", "prompt `question: {question} sentence: {sentence}`"),
        ("glue qqp", "question1,question2,label,idx", "prompt `question1: {question1} question2: {question2}`"),
        ("anli", "uid,premise,hypothesis,label,reason", "prompt `hypothesis: {hypothesis} premise: {premise}`"),
        (
            "stsb_multi_mt",
            "sentence1,sentence2,similarity_score",
            "prompt `sentence1: {sentence1} sentence2: {sentence2}`",
        ),
        (
            "boolq",
            "question,answer,passage",
            "prompt `question: {question} passage: {passage}`, response from `answer`",
        ),
        (
            "super_glue boolq",
            "question,passage,idx,label",
            "prompt `question: {question} passage: {passage}`, response from `label`",
        ),
        (
            "quora",
            "id,qid1,qid2,question1,question2,is_duplicate",
            "prompt `question1: {question1} question2: {question2}`",
        ),
        (
            "snli JSONL",
            "gold_label,sentence1,sentence2",
            "prompt `sentence1: {sentence1} sentence2: {sentence2}`, response from `gold_label`",
        ),
        ("nq_open", "question,answer", "prompt from `question`, response from `answer`"),
        (
            "trivia_qa",
            "question,question_id,answer,answer.aliases,answer.value",
            "prompt from `question`, response from `answer.value`",
        ),
        ("MATH", "problem,level,type,solution", "prompt from `problem`, response from `solution`"),
        ("firefly", "kind,input,target", "prompt from `input`, response from `target`"),
        ("common_gen", "concept_set_idx,concepts,target", "prompt from `concepts`, response from `target`"),
        ("tnews", "label,label_desc,sentence,keywords", "prompt from `sentence`, response from `label_desc`"),
        (
            "P3",
            "inputs,inputs_pretokenized,targets,targets_pretokenized",
            "prompt from `inputs_pretokenized`, response from",
        ),
        ("go_emotions", "text,labels,id", "prompt from `text`, response from `labels`"),
        (
            "news_category",
            "link,headline,category,short_description,date",
            "prompt from `headline`, response from `category`",
        ),
        ("no_robots", "prompt,prompt_id,messages,category", "chats from `messages`"),
        ("MetaMathQA", "type,query,original_question,response", "prompt from `query`, response from `response`"),
        ("imdb CSV", "review,sentiment", "prompt from `review`, response from `sentiment`"),
        (
            "squad",
            "id,title,context,question,answers.text,answers.answer_start",
            "prompt `question: {question} context: {context}`, response from `answers.text`",
        ),
        ("amazon_polarity", "label,title,content", "prompt `{title}\\n{content}`, response from `label`"),
        ("dbpedia_14", "label,title,content", "prompt `{title}\\n{content}`, response from `label`"),
        ("xsum", "document,summary,id", "prompt from `document`, response from `summary`"),
        ("cnn_dailymail", "article,highlights,id", "prompt from `article`, response from `highlights`"),
        ("samsum", "id,dialogue,summary", "prompt from `dialogue`, response from `summary`"),
        ("billsum", "text,summary,title", "prompt from `text`, response from `summary`"),
        ("scientific_papers", "article,abstract,section_names", "prompt from `article`, response from `abstract`"),
        ("alpaca", "instruction,input,output,text", "prompt from `instruction` and `input`, response from `output`"),
        (
            "dolly",
            "instruction,context,response,category",
            "prompt from `instruction` and `context`, response from `response`",
        ),
        ("OpenOrca", "id,system_prompt,question,response", "prompt from `system_prompt` and `question`, response"),
        ("gsm8k", "question,answer", "prompt from `question`, response from `answer`"),
        ("aya", "inputs,targets,language,language_code", "prompt from `inputs`, response from `targets`"),
        ("ultrachat_200k", "prompt,prompt_id,messages", "chats from `messages`"),
        ("ShareGPT", "id,conversations", "chats from `conversations`"),
        ("lmsys-chat-1m", "conversation_id,model,conversation,turn,language", "chats from `conversation`"),
        ("wikitext", "text", "text from `text`"),
        ("wikipedia", "id,url,title,text", "text from `text`"),
        ("c4", "text,timestamp,url", "text from `text`"),
        ("fineweb", "text,id,dump,url,date,file_path,language,language_score,token_count", "text from `text`"),
        ("fineweb-edu", "text,id,dump,url,language_score,token_count,score,int_score", "text from `text`"),
        ("the_pile", "text,meta", "text from `text`"),
    ] {
        println!("{data_set}");
        check(columns, expected);
    }
    for (data_set, columns, expected) in [
        ("wmt16", "translation.de,translation.en", "from `de` to `en`; from `en` to `de`"),
        ("trec", "text,coarse_label,fine_label", "`coarse_label` the target; pairs"),
        (
            "ratings",
            "text,score",
            "the number in `score` the target, also for `task.name=regression`; pretraining on `text` alone",
        ),
        ("winogrande", "sentence,option1,option2,answer", "no prompt"),
        ("race", "example_id,article,answer,question,options", "`article` and `options` belong to the question"),
        ("mmlu", "question,subject,choices,answer", "`choices` belongs to the question; `choices` is left out"),
        ("mmlu CSV", "question,A,B,C,D,answer", "`A` and `B` and `C` and `D` belong to the question"),
        ("medmcqa", "id,question,opa,opb,opc,opd,cop,answer", "`opa` and `opb` and `opc` and `opd` belong"),
        ("multirc", "paragraph,question,answer,idx,label", "the target is `answer`; the target is `label`"),
        (
            "hotpot_qa",
            "id,question,answer,context,context.title,context.sentences",
            "`context.sentences` belongs to the question",
        ),
        (
            "ms_marco",
            "answers,passages,passages.is_selected,passages.passage_text,query,query_id",
            "`passages.passage_text` belongs to the question",
        ),
        ("record", "passage,query,entities,answers", "`passage` belongs to the question; `passage` is left out"),
        ("RAG", "question,context,response", "`context` belongs to the question"),
        ("opus100 of three", "translation.a,translation.b,translation.c", "from `a` to `c`; from `b` to `a`"),
        ("quail", "context_id,passage,question,answer_id", "no prompt"),
        (
            "arc",
            "id,question,choices,choices.text,choices.label,answerKey",
            "`choices.text` belongs to the question; `choices.text` is left out",
        ),
        ("hellaswag", "ind,activity_label,ctx,endings,label", "no prompt"),
        ("piqa", "goal,sol1,sol2,label", "no prompt"),
        ("mbpp", "task_id,text,code,test_list", "pretraining on `text` alone"),
        ("oasst1", "message_id,parent_id,text,role,lang", "pretraining on `text` alone"),
        ("hh-rlhf", "chosen,rejected", "no prompt"),
        ("openai_humaneval", "task_id,prompt,canonical_solution,test,entry_point", "no response"),
    ] {
        println!("{data_set}");
        refused(columns, expected);
    }
}

#[test]
fn the_answers_to_a_question_keep_the_text_that_the_question_is_about() {
    let Err(Unpaired::Question(meanings)) = pairing("paragraph question answer label") else { panic!("one meaning") };
    let expected = "--source-template '{paragraph}\\n{question}' --response-column answer";
    assert_eq!(meanings[0].flags(), expected);
}

#[test]
fn a_translation_of_many_languages_names_them_instead_of_two() {
    let columns = "translation translation.ar translation.de translation.en translation.fr";
    let Err(Unpaired::Template("source_lang", reason)) = pairing(columns) else { panic!("{columns}") };
    assert_eq!(reason, "expected one of the 4 languages of `translation`: ar, de, en, fr");
}

#[test]
fn the_header_of_mrpc_is_known() {
    let columns = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"].map(str::to_owned);
    let words = Pairing::choose(&columns, &Chosen::default()).unwrap().in_words();
    assert_eq!(words, "prompt `sentence1: {#1 String} sentence2: {#2 String}`, response from `Quality`");
}

#[test]
fn languages_and_templates_choose_columns() {
    let of = |columns: &str, chosen: &Chosen| {
        let columns: Vec<String> = columns.split(' ').map(str::to_owned).collect();
        Pairing::choose(&columns, chosen)
    };
    let text = |text: &str| Some(text.to_owned());
    let languages = Chosen { source_lang: text("en"), target_lang: text("de"), ..Chosen::default() };
    for columns in ["translation translation.de translation.en", "de en"] {
        let pairing = of(columns, &languages).unwrap();
        assert!(pairing.flat().is_some_and(|(from, to)| from.ends_with("en") && to.ends_with("de")), "{columns}");
    }
    assert_eq!(of("en fr", &languages), Err(Unpaired::Missing("translation.de".to_owned())));
    let regions = Chosen { source_lang: text("en_XX"), target_lang: text("de_DE"), ..Chosen::default() };
    let pairing = of("translation translation.de translation.en", &regions).unwrap();
    assert_eq!(pairing.flat(), Some(("translation.en", "translation.de")));
    let columns = ["translation", "translation.de", "translation.en", "meta", "meta.url"].map(str::to_owned);
    assert_eq!(pairing.unused(&columns), ["meta"]);
    let templates = Chosen { source: text("{subject}\\n{body}"), ..Chosen::default() };
    let pairing = of("subject body queue label", &templates).unwrap();
    assert_eq!(pairing.in_words(), "prompt `{subject}\\n{body}`, response from `label`");
    assert_eq!(pairing.unused(&["body", "queue"].map(str::to_owned)), ["queue"]);
    let absent = Chosen { prompt: text("nosuch"), ..Chosen::default() };
    assert_eq!(of("document summary", &absent), Err(Unpaired::Missing("nosuch".to_owned())));
    assert_eq!(of("subject label", &templates), Err(Unpaired::Missing("body".to_owned())));
    let both = Chosen { target: text("{queue}: {label}"), ..templates };
    assert!(matches!(of("subject body queue label", &both), Ok(Pairing::Templates { .. })));
}
