//! Submitting: the way of each part, what it is behind, and starting it.

use std::sync::Arc;
use std::time::Instant;

use super::Engine;
use crate::again::Attempts;
use crate::batch::{AllPending, BatchId, Holds, Path, Told};
use crate::ended::{Ended, Facts, Fallback, Transport};
use crate::error::{Error, Result};
use crate::plan::Op;
use crate::request::{Copies, Part, SubmitOptions};
use crate::target::Target;
use crate::transport::peer::Submitted;
use crate::transport::{Behind, Route};

impl Engine {
    /// Starts copying and returns without waiting.
    ///
    /// The copies of one batch have no order among each other, nor with those of other batches
    /// that run at the same time. All local ends lie on one device, and it copies; between host
    /// memory here and a GPU's there, a GPU of this engine does, for which the host memory is
    /// page-locked at first use. An empty list, and one of zero-length ranges, completes at once.
    ///
    /// Memory that a node's peer is not known to have makes the call ask that peer again, once, before
    /// it refuses: some milliseconds, and 10 seconds where the peer does not answer.
    ///
    /// # Errors
    /// If anything is wrong with the list, the target or the device, before anything moves:
    /// nothing was submitted. A failure later is in the batch's status.
    pub fn submit<'a>(
        &self,
        target: &'a Target,
        op: Op,
        copies: impl Into<Copies<'a>>,
    ) -> Result<BatchId> {
        let part = Part { target, op, copies: copies.into() };
        self.submit_parts(&[part], &SubmitOptions::default())
    }

    /// As [`Engine::submit`], for several targets at once and in order with the caller's own work.
    /// The parts are copied side by side, so that every link carries at any moment.
    ///
    /// With a producer in the options, or batches to be behind, the copies wait on the device. The
    /// call returns without waiting as long as the device's descriptor ring has room: 32 slots of
    /// 8192 pieces, of which a batch of more than a few pieces takes at least one until its launches
    /// have ended, and of which batches that wait hold 16 at most, about 130,000 pieces. A call that
    /// finds no room waits for the oldest launch, or for the oldest of what those wait for, and other
    /// submissions to the same device wait with it. (Between a GPU and host memory: 8 slots of 32,768
    /// pieces in each direction.)
    ///
    /// # Errors
    /// As [`Engine::submit`], [`Error::UnknownBatch`], [`Error::NotAllSubmitted`] behind a batch that
    /// goes over TCP and has not ended, and `NotOrderable` behind a batch of another device, or for
    /// what goes over TCP behind any.
    pub fn submit_parts(&self, parts: &[Part<'_>], options: &SubmitOptions<'_>) -> Result<BatchId> {
        self.check_process()?;
        self.try_submit(parts, options).inspect_err(|error| {
            self.meters.refused(error);
            self.counters.refused();
        })
    }

    fn try_submit(&self, parts: &[Part<'_>], options: &SubmitOptions<'_>) -> Result<BatchId> {
        let began = Instant::now();
        let mut attempts = Attempts::of(parts);
        loop {
            match self.submit_once(began, parts, options) {
                // Nothing moved.
                Err(error) if attempts.learned_from(&error) => {}
                submitted => return submitted,
            }
        }
    }

    fn submit_once(
        &self,
        began: Instant,
        parts: &[Part<'_>],
        options: &SubmitOptions<'_>,
    ) -> Result<BatchId> {
        if let Some(lost) = parts.iter().find_map(|part| part.target.lost()) {
            return Err(lost);
        }
        let behind = self.behind(options.behind)?;
        let routes = self.routes(parts)?;
        let (near, far) = Route::divide(parts, &routes);
        let far: Vec<_> = far.iter().filter(|part| !part.copies.are_empty()).collect();
        let planned = match far.is_empty() {
            true => None,
            false if !behind.is_empty() => return Err(not_behind()),
            false => {
                let tcp = self.tcp()?;
                let planned = tcp.plan(&self.peer, &self.registry, &far)?;
                Some((tcp, planned))
            }
        };
        let mut all = Submitted::nothing();
        let mut any = self.peer.submit(&self.registry, &near, options, &behind, &mut all)?;
        let transfer = match planned {
            None => None,
            Some((tcp, (planned, summary))) => {
                any = true;
                all.bytes += summary.bytes;
                all.path = all.path.and(summary.path);
                let unmapped = routes.iter().any(Route::is_fallback);
                let unmapped = unmapped.then_some(Fallback::NotMapped);
                all.fallback = unmapped.or(all.fallback).or(summary.fallback);
                let Holds { targets, _pins, .. } = summary.holds;
                all.holds.targets.extend(targets);
                all.holds._pins.extend(_pins);
                let started = tcp.start(&self.peer, planned, &far, options.after);
                match started {
                    Ok(transfer) => Some(transfer),
                    Err(error) if all.is_nothing() => return Err(error),
                    Err(error) => {
                        all.failure.get_or_insert(error);
                        None
                    }
                }
            }
        };
        if !any {
            let facts = Facts::new(parts, began, Transport::None);
            let (path, time) = (Path::None, began.elapsed());
            self.tell(&Ended { facts, path, bytes: 0, time, failure: None });
            let id = self.batches.insert_completed();
            if let Some(notifier) = self.notifier.get() {
                notifier.signal();
            }
            return Ok(id);
        }
        if let Some(error) = &all.failure {
            tracing::warn!(%error, "a batch failed while it was submitted");
        }
        let Submitted { pending, paced, failure, bytes, path, choice, fallback, holds, overlap } =
            all;
        let transport = match (&transfer, choice) {
            (Some(_), _) if near.iter().any(|part| !part.copies.are_empty()) => Transport::Mixed,
            (Some(_), _) => Transport::Tcp,
            (None, Some(_)) => Transport::Offload,
            (None, None) => Transport::Peer,
        };
        let fallback = fallback.or(choice.and_then(|choice| choice.reason.fallback()));
        let facts = Facts { fallback, ..Facts::new(parts, began, transport) };
        let _range = self.nvtx.as_ref().map(|nvtx| facts.range(nvtx, bytes));
        let told = Told { span: facts.span(parts, bytes), facts, _range };
        // An empty list without memory of its own is the rule.
        let paced = if paced.is_empty() { Arc::default() } else { paced.into() };
        let pending =
            AllPending { submissions: pending, paced, transfer, overlap: overlap.map(Arc::new) };
        let id = self.batches.insert_running(pending, failure, bytes, (path, choice), holds, told);
        if let Some(notifier) = self.notifier.get() {
            notifier.wake();
        }
        tracing::debug!(%id, parts = parts.len(), bytes, %path, "submitted");
        Ok(id)
    }

    /// The way of each part; makes the lanes that are missing. None if mappings reach everything.
    fn routes<'a>(&self, parts: &[Part<'a>]) -> Result<Vec<Route<'a>>> {
        if parts.iter().all(|part| part.target.is_near()) {
            return Ok(Vec::new());
        }
        let local = self.registry.table();
        let routed = parts.iter().map(|part| {
            let route = Route::of(part, &local)?;
            if !part.target.is_far() && !matches!(route, Route::Near) {
                let tcp = self.tcp()?;
                part.target.connect(|address| {
                    tcp.session(part.target.name(), address, part.target.incarnation())
                })?;
                if let Route::Both { .. } = route {
                    tcp.check_whole(&self.peer, &self.registry, part)?;
                }
            }
            Ok(route)
        });
        routed.collect()
    }

    /// What batches wait for that have not ended.
    fn behind(&self, batches: &[BatchId]) -> Result<Behind> {
        let mut all = Behind::default();
        for &id in batches {
            let (_, is_over_tcp) = self.batches.ask(id, |pending| {
                all.pending.extend(pending.submissions.iter().cloned());
                for paced in pending.paced.iter() {
                    match paced.submissions() {
                        Some(steps) => all.pending.extend(steps),
                        None => all.paced.push(Arc::clone(paced)),
                    }
                }
                pending.is_over_tcp()
            })?;
            if is_over_tcp == Some(true) {
                return Err(Error::NotAllSubmitted(id));
            }
        }
        Ok(all)
    }
}

fn not_behind() -> Error {
    Error::Device(kvferry_device::Error::NotOrderable {
        device: "TCP".into(),
        what: "batch",
        reason: "what goes over TCP is behind no other batch; wait for that".into(),
    })
}
