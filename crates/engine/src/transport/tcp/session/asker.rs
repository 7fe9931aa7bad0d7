//! What one lane asks for, and what it hears.

use std::collections::HashMap;
use std::sync::Arc;

use kvferry_wire::batch::{Code, Initiator, Outcome, Status, initiator};

use super::super::channel::{Channel, Failure, Role};
use super::super::cut::Scratch;
use super::super::layout::Layout;
use super::super::transfer::{Asked, Claim, Job, Work};
use super::{AT_ONCE, Queue, SessionShared, Standing};
use crate::error::Error;

/// Bytes of its requests that a lane has before it, not gathered or not arrived yet, when it takes the
/// next one: a READ finds its way to the first byte in the time of a few slices (on an H200 machine,
/// reads of 64 MiB took 6.0 ms with a quarter of it, and 5.0 with this).
const BACKLOG: u64 = 4 << 20;

/// A lane's requests, over all its connections.
pub(super) struct Asker {
    shared: Arc<SessionShared>,
    index: usize,
    scratch: Scratch,
    pub(super) asked: HashMap<u64, Open>,
    /// Requests that are over at the peer.
    ended: HashMap<u64, Outcome>,
    /// Requests that ended, ever.
    pub(super) ended_count: u64,
    pub(super) open: bool,
    pub(super) draining: bool,
    /// The last sweep that it took part in.
    swept: u64,
    /// Why there will be no other connection.
    pub(super) loss: Option<String>,
}

/// A request of the lane's.
pub(super) struct Open {
    claim: Claim,
    layout: Arc<Layout>,
    is_write: bool,
    /// What failed at this side.
    failure: Option<Error>,
}

impl Role<Initiator> for Asker {
    fn attend(&mut self, end: &mut Initiator, channel: &mut Channel) -> bool {
        loop {
            self.sweep(end, |request| channel.stop_sending(request));
            self.hear(end, channel);
            match self.ask(end, channel) {
                None => return false,
                Some(false) => return true,
                // Its bytes are gathered while the request goes out.
                Some(true) => drop(end.outgoing()),
            }
        }
    }
}

impl Asker {
    pub(super) fn new(shared: Arc<SessionShared>, index: usize) -> Self {
        Self {
            shared,
            index,
            scratch: Scratch::default(),
            asked: HashMap::new(),
            ended: HashMap::new(),
            ended_count: 0,
            open: false,
            draining: false,
            swept: 0,
            loss: None,
        }
    }

    fn hear(&mut self, end: &mut Initiator, channel: &mut Channel) {
        while let Some(event) = end.event() {
            match event {
                initiator::Event::Opened(agreed) => {
                    channel.opened(agreed);
                    self.open = true;
                    self.shared.queue().lanes[self.index] = Standing::Busy;
                }
                initiator::Event::Begun { request } => {
                    if let Some(open) = self.asked.get(&request) {
                        channel.begin(request, Arc::clone(&open.layout), open.is_write);
                    }
                }
                initiator::Event::Released(release) => channel.released(&release),
                initiator::Event::Arrived(landing) => channel.arrived(end, &landing),
                initiator::Event::Draining => self.draining = true,
                initiator::Event::Ended { request, outcome } => {
                    self.ended.insert(request, outcome);
                    channel.change(request);
                }
            }
        }
        for request in channel.take_changed() {
            let Some(it) = channel.of(request) else {
                self.finish(request);
                continue;
            };
            let (copies, fell_back) = (it.copies, it.fell_back);
            if let Some(Failure { status, ours }) = it.failure.clone() {
                end.fail(request, status);
                if let Some(open) = self.asked.get_mut(&request) {
                    open.failure = ours;
                }
            }
            if fell_back && let Some(open) = self.asked.get(&request) {
                open.claim.fall_back();
            }
            if copies == 0 && self.ended.contains_key(&request) {
                channel.end(request);
                self.finish(request);
            }
        }
    }

    /// Gives requests up that nobody wants any more since the last time; `stop` is told of each.
    pub(super) fn sweep(&mut self, end: &mut Initiator, mut stop: impl FnMut(u64)) {
        let sweeps = self.shared.queue().sweeps;
        if std::mem::replace(&mut self.swept, sweeps) == sweeps {
            return;
        }
        let is_unwanted = |(_, open): &(&u64, &Open)| open.claim.unwanted().is_some();
        for (&request, _) in self.asked.iter().filter(is_unwanted) {
            stop(request);
            end.cancel(request);
        }
    }

    /// Takes a job if the lane has room, and says whether it did. None if the lane shall end.
    fn ask(&mut self, end: &mut Initiator, channel: &mut Channel) -> Option<bool> {
        let mut queue = self.shared.queue();
        if queue.stopped.is_some() {
            return None;
        }
        let Some(job) = self.next_job(&mut queue, end, channel) else {
            if queue.closed && queue.jobs.is_empty() && self.asked.is_empty() {
                end.retire();
            }
            return Some(false);
        };
        drop(queue);
        self.begin(job, end);
        Some(true)
    }

    /// The next job, if it is this lane's to do.
    fn next_job(&self, queue: &mut Queue, end: &Initiator, channel: &mut Channel) -> Option<Job> {
        if !self.open || self.draining {
            return None;
        }
        queue.lanes[self.index] = Standing::Busy;
        // One that would wait here behind others is left for lanes that are on their way to it.
        let called = queue.lanes.iter().filter(|lane| **lane == Standing::Called).count();
        let is_free = end.requests() == 0;
        let may = is_free
            || queue.jobs.len() > called
                && end.requests() < AT_ONCE
                && self.backlog(channel) < BACKLOG;
        let job = if may { queue.jobs.pop_front() } else { None };
        if job.is_none() && is_free {
            queue.lanes[self.index] = Standing::Idle;
        }
        job
    }

    /// Bytes of the lane's requests that it has not begun to move.
    fn backlog(&self, channel: &mut Channel) -> u64 {
        let left = |(&request, open): (&u64, &Open)| match channel.of(request) {
            Some(it) => it.left(),
            None => open.layout.length,
        };
        self.asked.iter().map(left).sum()
    }

    /// Makes requests of a job: one for this lane, and what it was not alone.
    fn begin(&mut self, job: Job, end: &mut Initiator) {
        let Job { claim, work } = job;
        if let Some(error) = claim.unwanted() {
            return claim.end(Err(error));
        }
        let asked = match work {
            Work::Ask(asked) => asked,
            Work::Cut(share) => {
                self.scratch.buffer = end.buffer();
                let mut cut = match share.cut(&mut self.scratch) {
                    Ok(cut) => cut.into_iter(),
                    Err(error) => return claim.end(Err(error)),
                };
                let Some(first) = cut.next() else { return claim.end(Ok(())) };
                let rest: Vec<_> =
                    cut.map(|it| Job { claim: claim.another(), work: Work::Ask(it) }).collect();
                self.shared.put_back(rest);
                first
            }
        };
        let Asked { encoded, layout, is_write } = asked;
        match end.submit(encoded) {
            Ok(request) => {
                let open = Open { claim, layout: Arc::new(layout), is_write, failure: None };
                self.asked.insert(request, open);
            }
            Err(full) => {
                let work = Work::Ask(Asked { encoded: full.request, layout, is_write });
                self.shared.put_back(vec![Job { claim, work }]);
            }
        }
    }

    /// Hears the ends of requests while there is no connection, and so no copy.
    pub(super) fn hear_ends(&mut self, end: &mut Initiator) {
        while let Some(event) = end.event() {
            if let initiator::Event::Ended { request, outcome } = event {
                self.ended.insert(request, outcome);
            }
        }
        let ended: Vec<_> = self.ended.keys().copied().collect();
        ended.into_iter().for_each(|request| self.finish(request));
    }

    fn finish(&mut self, request: u64) {
        let Some(outcome) = self.ended.remove(&request) else { return };
        let Some(open) = self.asked.remove(&request) else { return };
        self.ended_count += 1;
        // A READ may be done at the peer while its last bytes are still copied here.
        if let Some(error) = open.failure {
            return open.claim.end(Err(error));
        }
        let given_up = matches!(
            outcome,
            Outcome::Failed(Status { code: Code::Cancelled, .. }) | Outcome::Lost { quiet: true }
        );
        if let Some(error) = open.claim.unwanted().filter(|_| given_up) {
            return open.claim.end(Err(error));
        }
        match outcome {
            Outcome::Done => open.claim.end(Ok(())),
            Outcome::Failed(status) => open.claim.fail(&status.to_string()),
            Outcome::Lost { quiet } => {
                let reason = self.loss.as_deref().unwrap_or("its lane was lost too often");
                let mut reason = reason.to_owned();
                if !quiet {
                    reason += "; the peer may still use its own memory for it until it notices";
                }
                open.claim.fail(&reason);
            }
        }
    }
}
