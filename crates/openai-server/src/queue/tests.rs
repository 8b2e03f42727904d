//! Tests of the queue.

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;

use crate::delivery::Untaken;

fn job_of(client: u8, text: &str) -> (Job, UnboundedReceiver<(usize, Event)>) {
    let (events, receiver) = unbounded_channel();
    let delivery = Delivery::new(&Untaken::new(1 << 20, 1));
    let origin =
        Origin { model: 0, client: address(client), answer_tokens: 256, request_id: "r".into(), events, delivery };
    let options =
        Options { n: 1, max_tokens: Some(if text.starts_with("long") { 256 } else { 8 }), ..Options::default() };
    (Job::new(&origin, Arc::new(Prompt::Text(text.into())), options, 0), receiver)
}

fn address(client: u8) -> IpAddr {
    IpAddr::from([127, 0, 0, client])
}

fn job(text: &str) -> (Job, UnboundedReceiver<(usize, Event)>) {
    job_of(1, text)
}

fn text(job: &Job) -> &str {
    let Prompt::Text(text) = &*job.prompt else { panic!("{job:?}") };
    text
}

#[test]
fn jobs_come_out_in_order_and_only_so_many_wait() {
    let queue = Queue::new(2);
    let (jobs, receivers): (Vec<_>, Vec<_>) = ["a", "b", "c"].map(job).into_iter().unzip();
    let mut jobs = jobs.into_iter();
    jobs.by_ref().take(2).for_each(|job| queue.push(vec![job]).unwrap());
    let refused = queue.push(jobs.collect()).unwrap_err();
    assert_eq!((refused.status, refused.retry_after_s), (429, Some(2)));
    let first = queue.next().unwrap();
    assert_eq!((text(&first), queue.load()), ("a", Load { waiting: 1, running: 1 }));
    queue.put_back(queue.try_next(&[]).unwrap());
    assert_eq!(queue.load(), Load { waiting: 1, running: 1 });
    let second = queue.try_next(&[]).unwrap();
    assert_eq!(text(&second), "b");
    assert_eq!((first.number, second.number), (0, 1));
    drop((first, second));
    assert_eq!(queue.load(), Load::default());
    drop(receivers);
}

#[test]
fn a_job_that_nobody_waits_for_makes_way() {
    let queue = Queue::new(1);
    let (gone, receiver) = job("gone");
    queue.push(vec![gone]).unwrap();
    drop(receiver);
    let (next, _receiver) = job("next");
    queue.push(vec![next]).unwrap();
    assert_eq!(text(&queue.next().unwrap()), "next");
}

#[test]
fn a_closed_queue_gives_out_what_it_has_and_then_says_so() {
    let queue = Queue::new(2);
    let (only, _receiver) = job("a");
    queue.push(vec![only]).unwrap();
    queue.close();
    assert_eq!(queue.push(vec![job("b").0]).unwrap_err().status, 503);
    assert!(queue.next().is_some() && queue.next().is_none());
}

#[test]
fn the_client_with_the_least_work_in_progress_is_next() {
    let queue = Queue::new(8);
    let (jobs, _receivers): (Vec<_>, Vec<_>) = [(1, "a1"), (1, "a2"), (1, "a3"), (2, "b1"), (2, "b2"), (3, "c1")]
        .map(|(c, text)| job_of(c, text))
        .into_iter()
        .unzip();
    jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
    assert_eq!(queue.parts(job("a").0.share), 3);
    let mut running = Vec::new();
    for (expected, work) in [("a1", 10), ("b1", 5), ("c1", 20), ("b2", 5), ("a2", 1), ("a3", 1)] {
        let mut next = queue.try_next(&[]).unwrap();
        assert_eq!(text(&next), expected);
        next.weigh(work);
        running.push(next);
    }
    running.clear();
    assert_eq!(queue.load(), Load::default());
}

#[test]
fn in_a_full_queue_the_client_with_most_jobs_makes_way_for_one_with_fewer() {
    let queue = Queue::new(3);
    let (jobs, mut receivers): (Vec<_>, Vec<_>) = ["a1", "a2", "a3"].map(job).into_iter().unzip();
    jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
    assert_eq!(queue.push(vec![job("a4").0]).unwrap_err().status, 429);
    let (other, _receiver) = job_of(2, "b1");
    queue.push(vec![other]).unwrap();
    assert!(matches!(receivers.pop().unwrap().try_recv(), Ok((0, Event::Failed(error))) if error.status == 429));
    let order: Vec<String> = std::iter::from_fn(|| queue.try_next(&[])).map(|job| text(&job).to_owned()).collect();
    assert_eq!(order, ["a1", "a2", "b1"]);
}

/// The jobs of a request of so many texts of so many letters.
fn request_of(client: u8, texts: usize, letters: usize) -> (Vec<Job>, UnboundedReceiver<(usize, Event)>) {
    let (events, receiver) = unbounded_channel();
    let delivery = Delivery::new(&Untaken::new(1 << 20, 1));
    let client = address(client);
    let origin = Origin { model: 0, client, answer_tokens: 256, request_id: "r".into(), events, delivery };
    let query: Arc<str> = "query".into();
    let document = |place| {
        let prompt = Arc::new(Prompt::Pair(Arc::clone(&query), "x".repeat(letters)));
        Job::new(&origin, prompt, Options { n: 1, max_tokens: Some(1), ..Options::default() }, place)
    };
    let mut jobs: Vec<Job> = (0..texts).map(document).collect();
    let taken = places::parts(&jobs.iter().map(|job| (&job.prompt, &job.options)).collect::<Vec<_>>(), 20 << 10);
    jobs.iter_mut().zip(taken).for_each(|(job, parts)| job.parts = parts);
    (jobs, receiver)
}

#[test]
fn one_request_of_many_texts_leaves_others_most_of_the_queue_and_stays_in_it() {
    // The most and the longest texts of a body of 128 KiB, in the default queue.
    for (letters, expected) in [(2000, 54), (10, 60)] {
        let queue = Queue::new(64);
        let (jobs, mut largest) = request_of(1, 64, letters);
        queue.push(jobs).unwrap();
        let mut others = Vec::new();
        while others.len() < 1000 {
            let (job, receiver) = job_of(2 + others.len() as u8 % 200, "other");
            if queue.push(vec![job]).is_err() {
                break;
            }
            others.push(receiver);
        }
        assert_eq!(others.len(), expected, "requests of others beside 64 texts of {letters} letters");
        assert!(largest.try_recv().is_err(), "the only request of its client stays");
        let mut taken: Vec<Job> = std::iter::from_fn(|| queue.try_next(&[])).collect();
        taken.retain(|job| job.share.client == address(1));
        assert_eq!(taken.len(), 64, "each of its texts is served");
    }
}

#[test]
fn a_client_of_many_requests_makes_way_until_it_has_one() {
    let queue = Queue::new(8);
    let mut receivers: Vec<_> = (0..4)
        .map(|_| {
            let (jobs, receiver) = request_of(1, 16, 1500);
            queue.push(jobs).unwrap();
            receiver
        })
        .collect();
    let others: Vec<_> = (0..6).map(|number| job_of(2 + number, "other")).collect();
    let (jobs, _others): (Vec<_>, Vec<_>) = others.into_iter().unzip();
    jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
    let refused: Vec<bool> = receivers.iter_mut().map(|receiver| receiver.try_recv().is_ok()).collect();
    assert_eq!(refused, [false, true, true, true]);
    assert_eq!(queue.load().waiting, 16 + 6);
    assert_eq!(queue.push(vec![job_of(9, "one more").0]).unwrap_err().status, 429);
}

#[test]
fn a_request_of_more_than_the_queue_waits_and_leaves_others_a_place() {
    for places in [1, 2, 3, 8] {
        let queue = Queue::new(places);
        let (jobs, _receiver) = request_of(1, 64, 16 << 10);
        queue.push(jobs).unwrap();
        let (job, _other) = job_of(2, "other");
        assert_eq!(queue.push(vec![job]).is_ok(), places > 1, "{places} places");
    }
}

#[test]
fn of_refused_jobs_a_share_has_one_before_the_running_jobs_go_on() {
    let queue = Queue::new(8);
    let (jobs, _receivers): (Vec<_>, Vec<_>) = [(1, "bad 1"), (1, "bad 2"), (1, "bad 3"), (2, "good"), (3, "bad 4")]
        .map(|(c, text)| job_of(c, text))
        .into_iter()
        .unzip();
    jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
    let (mut running, mut rounds) = (Vec::new(), Vec::new());
    while queue.load().waiting > 0 {
        let mut round = Vec::new();
        queue.admit(|job| {
            round.push(text(&job).to_owned());
            match text(&job).starts_with("bad") {
                true => Admission::Refused,
                false => {
                    running.push(job);
                    Admission::Begun
                }
            }
        });
        rounds.push(round);
    }
    assert_eq!(rounds, [vec!["bad 1", "good", "bad 4"], vec!["bad 2"], vec!["bad 3"]]);
}

#[test]
fn jobs_without_room_stay_in_their_places() {
    let queue = Queue::new(8);
    let (jobs, _receivers): (Vec<_>, Vec<_>) =
        [(1, "a1"), (1, "a2"), (2, "b1"), (3, "c1")].map(|(c, text)| job_of(c, text)).into_iter().unzip();
    jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
    let mut offered = Vec::new();
    queue.admit(|job| {
        offered.push(text(&job).to_owned());
        if offered.len() == 2 { Admission::Full(job) } else { Admission::ShareIsFull(job) }
    });
    assert_eq!((offered, queue.load()), (vec!["a1".to_owned(), "b1".to_owned()], Load { waiting: 4, running: 0 }));
    assert_eq!(text(&queue.next().unwrap()), "a1");
}

#[test]
fn short_jobs_do_not_wait_for_the_long_ones_of_their_client() {
    let queue = Queue::new(4);
    let (jobs, mut receivers): (Vec<_>, Vec<_>) = ["long 1", "long 2", "long 3", "long 4"].map(job).into_iter().unzip();
    jobs.into_iter().for_each(|job| queue.push(vec![job]).unwrap());
    let mut running = vec![queue.try_next(&[]).unwrap()];
    running[0].weigh(100);
    for (number, text) in ["a1", "a2", "a3"].into_iter().enumerate() {
        let (job, receiver) = job(text);
        // The queue has room for one. Then the last long one makes way, until both sizes have two.
        assert_eq!(queue.push(vec![job]).is_ok(), number < 2, "{text}");
        receivers.push(receiver);
    }
    assert!(matches!(receivers[3].try_recv(), Ok((0, Event::Failed(error))) if error.status == 429));
    assert_eq!(queue.parts(running[0].share), 2, "sizes of one client");
    let mut order = Vec::new();
    while let Some(mut next) = queue.try_next(&[]) {
        next.weigh(if text(&next).starts_with("long") { 100 } else { 1 });
        order.push(text(&next).to_owned());
        running.push(next);
    }
    assert_eq!(order, ["a1", "a2", "long 2", "long 3"]);
}

#[test]
fn sizes_are_those_of_prompts_and_answers_together_and_few() {
    let size = |prompt: Prompt, options: Options| Share::new(address(1), &prompt, &options, 256).size;
    let check = |prompt: &str, n, max_tokens, expected| {
        let options = Options { n, max_tokens, ..Options::default() };
        assert_eq!(size(Prompt::Text(prompt.into()), options), expected, "{n} answers of {max_tokens:?} tokens");
    };
    check("short", 1, Some(8), 1);
    check("short", 1, Some(16), 2);
    check("short", 1, None, 4);
    check("short", 4, Some(1 << 40), 5);
    check(&"long".repeat(4096), 1, Some(1), 6);
    let labels = Options { labels: vec![String::new(); 64], max_tokens: Some(1), ..Options::default() };
    assert_eq!(size(Prompt::Tokens(Vec::new()), labels), 3);
}
