//! Request traces: one JSON object a line, {timestamp, input_length, output_length, hash_ids}, 512 tokens a block.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::Deserialize;

use crate::dice::{Dice, Zipf};
use crate::fail::{Failure, Outcome};

/// The tokens of one block.
pub(crate) const BLOCK_TOKENS: u64 = 512;

/// A line of a trace is no longer than this; the longest context (10 M tokens) takes 200 KB.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// One request of a trace. Other fields of a line are ignored.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Request {
    /// Milliseconds since the start of the trace.
    pub(crate) timestamp: f64,
    /// Tokens asked with.
    pub(crate) input_length: u64,
    /// Tokens answered.
    pub(crate) output_length: u64,
    /// The blocks of the input, in order; equal ids mean equal content and equal content before it.
    pub(crate) hash_ids: Vec<u64>,
}

/// Reads the first `requests_max` requests of the trace at `path`.
pub(crate) fn read(path: &Path, requests_max: usize) -> Outcome<Vec<Request>> {
    let file =
        File::open(path).map_err(|error| Failure::file(format!("trace {}", path.display()), &error))?;
    let refuse = |number: usize, why: &str| Failure::usage(format!("{}:{number}: {why}", path.display()));
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let (mut requests, mut line) = (Vec::new(), Vec::new());
    for number in 1.. {
        if requests.len() == requests_max {
            break;
        }
        line.clear();
        let read = (&mut reader).take(LINE_BYTES_MAX).read_until(b'\n', &mut line);
        match read.map_err(|error| refuse(number, &error.to_string()))? {
            0 => break,
            read if read as u64 == LINE_BYTES_MAX => {
                return Err(refuse(number, "the line is longer than 16 MiB"));
            }
            _ if line.trim_ascii().is_empty() => continue,
            _ => requests.push(parse(&line).map_err(|why| refuse(number, &why))?),
        }
    }
    if requests.is_empty() {
        return Err(Failure::usage(format!("trace {}: no request in it", path.display())));
    }
    Ok(requests)
}

fn parse(line: &[u8]) -> Result<Request, String> {
    let request: Request = serde_json::from_slice(line).map_err(|error| {
        // serde says "at line 1 column 9"; the line is ours to say.
        let text = error.to_string();
        let what = text.split(" at line ").next().unwrap_or_default();
        format!("not a request: {what} (column {})", error.column())
    })?;
    if !(0.0..=1e15).contains(&request.timestamp) {
        return Err(format!("not a request: timestamp {} is out of range", request.timestamp));
    }
    Ok(request)
}

/// Makes `count` requests like those of people talking to a model: sessions that share one of a few system prompts and
/// grow turn by turn, each turn asking with all that was said before. The same seed makes the same trace.
pub(crate) fn converse(seed: u64, count: usize) -> Vec<Request> {
    const PROMPTS: u64 = 8;
    const SESSIONS_AT_ONCE: usize = 400;
    let mut dice = Dice::new(seed);
    let popularity = Zipf::new(PROMPTS, 1.0);
    let mut next_id = 0;
    let prompts: Vec<Vec<u64>> = (0..PROMPTS).map(|_| fresh(&mut next_id, 1 + dice.below(6))).collect();
    let mut sessions: Vec<Session> = Vec::new();
    let mut requests = Vec::with_capacity(count);
    let mut clock_ms = 0.0;
    while requests.len() < count {
        clock_ms += dice.exponential(300.0);
        // Some turns open a session; the others go on with one, most likely with a recent one.
        if sessions.is_empty() || dice.unit() < 0.35 {
            let prompt = &prompts[popularity.draw(&mut dice) as usize];
            sessions.push(Session { tokens: prompt.len() as u64 * BLOCK_TOKENS, ids: prompt.clone() });
        }
        let back = (dice.exponential(150.0) as usize).min(sessions.len() - 1);
        let at = sessions.len() - 1 - back;
        let request = sessions[at].turn(clock_ms, &mut dice, &mut next_id);
        if sessions[at].tokens > 120_000 || dice.unit() < 0.2 {
            sessions.remove(at);
        } else {
            let session = sessions.remove(at);
            sessions.push(session);
        }
        if sessions.len() > SESSIONS_AT_ONCE {
            sessions.remove(0);
        }
        requests.push(request);
    }
    requests
}

struct Session {
    ids: Vec<u64>,
    tokens: u64,
}

impl Session {
    /// Asks with what was said so far and some more, and is answered.
    fn turn(&mut self, clock_ms: f64, dice: &mut Dice, next_id: &mut u64) -> Request {
        let question = 16 + dice.exponential(1500.0) as u64;
        let answer = 1 + dice.exponential(350.0) as u64;
        let mut ids = self.ids.clone();
        let input_length = self.tokens + question;
        ids.extend(fresh(next_id, input_length.div_ceil(BLOCK_TOKENS) - ids.len() as u64));
        // The last block of an input is seldom full: the next turn has another one in its place.
        self.ids = ids[..(input_length / BLOCK_TOKENS) as usize].to_vec();
        self.tokens = input_length + answer;
        Request { timestamp: clock_ms.round(), input_length, output_length: answer, hash_ids: ids }
    }
}

fn fresh(next_id: &mut u64, count: u64) -> Vec<u64> {
    let first = *next_id;
    *next_id += count;
    (first..*next_id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_line_and_ignores_other_fields() {
        let line = br#"{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47], "type": "text"}"#;
        let request = parse(line).unwrap();
        assert_eq!((request.timestamp, request.input_length, request.output_length), (27482.0, 6955, 52));
        assert_eq!(request.hash_ids, [46, 47]);
    }

    #[test]
    fn a_bad_line_is_named_by_file_and_number() {
        let path = std::env::temp_dir().join(format!("ebbtide-trace-{}.jsonl", std::process::id()));
        let good = r#"{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}"#;
        for (bad, expect) in [
            ("{\"timestamp\": 0", "EOF"),
            ("[1]", "invalid"),
            (r#"{"timestamp": 0, "input_length": 1, "output_length": 1}"#, "hash_ids"),
            (r#"{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}"#, "timestamp -1"),
            (r#"{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": []}"#, "-1"),
        ] {
            std::fs::write(&path, format!("{good}\n\n{bad}\n{good}\n")).unwrap();
            let Err(Failure::Usage(message)) = read(&path, usize::MAX) else { panic!("{bad} was taken") };
            assert!(message.contains(&format!("{}:3: ", path.display())), "{message}");
            assert!(message.contains(expect) && !message.contains(" at line "), "{message}");
            assert_eq!(read(&path, 1).unwrap().len(), 1, "the bad line lies beyond the first request");
        }
        std::fs::write(&path, "\n").unwrap();
        assert!(matches!(read(&path, 9), Err(Failure::Usage(message)) if message.contains("no request")));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(read(&path, 9), Err(Failure::Usage(message)) if message.contains("ebbtide-trace")));
    }

    #[test]
    fn conversations_share_and_grow_and_repeat_by_seed() {
        let requests = converse(1, 2000);
        assert_eq!(requests, converse(1, 2000));
        assert_ne!(requests, converse(2, 2000));
        let mut seen = std::collections::BTreeSet::new();
        let (mut leading, mut asked) = (0, 0);
        for request in &requests {
            assert_eq!(request.hash_ids.len() as u64, request.input_length.div_ceil(BLOCK_TOKENS));
            leading += request.hash_ids.iter().take_while(|id| seen.contains(*id)).count();
            asked += request.hash_ids.len();
            seen.extend(request.hash_ids.iter().copied());
        }
        let share = leading as f64 / asked as f64;
        assert!((0.3..0.9).contains(&share), "a cache without end would hit {share}");
        assert!(requests.windows(2).all(|pair| pair[0].timestamp <= pair[1].timestamp));
    }
}
