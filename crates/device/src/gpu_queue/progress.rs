//! What has ended and what still runs: giving back what was held, waits, and whether the device works.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{CHECK, Gate, GpuQueue, Open, SPIN};
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::queue::Completions;

impl<D: Driver> Gate<D> {
    /// Whether what it waits for is done. Inside the scope.
    fn look(&mut self, driver: &D) -> Result<bool> {
        self.is_open = self.is_open || driver.fired(self.event)?;
        Ok(self.is_open)
    }
}

impl<D: Driver> GpuQueue<D> {
    /// Gives back what finished submissions held. Makes no driver call.
    pub(super) fn reap(&mut self) {
        while let Some(front) = self.in_flight.front() {
            if !self.words.done(front.ticket) {
                break;
            }
            let done = self.in_flight.pop_front().expect("the front was just looked at");
            self.moved_on = true;
            self.end_event(done.ticket, done.end);
            for _ in 0..done.slots {
                self.free_oldest_slot();
            }
            self.free_words.push(done.ticket);
        }
        let mut index = 0;
        while let Some(gated) = self.gated.get(index) {
            if !self.words.done(gated.ticket) {
                index += 1;
                continue;
            }
            let done = self.gated.swap_remove(index);
            self.moved_on = true;
            self.end_event(done.ticket, done.end);
            self.free_words.push(done.ticket);
            if let Some(gate) = done.gate {
                self.close_gate(gate);
            }
        }
    }

    pub(super) fn close_gate(&mut self, gate: Gate<D>) {
        self.idle_events.push(gate.event);
        self.idle_gate_streams.push(gate.stream);
        self.idle_gate_streams.extend(gate.second);
        for slot in gate.slots {
            self.free_slot(slot);
            self.gated_slots -= 1;
        }
    }

    /// Polls until `ready`. Vendors offer no wait with a deadline, so this gives up the processor
    /// between polls once the wait is longer than a launch takes. Inside the scope.
    pub(super) fn wait_until(
        &mut self,
        open: &mut Open<D>,
        ready: impl Fn(&Self, &Open<D>) -> bool,
    ) -> Result<()> {
        if ready(self, open) {
            return Ok(());
        }
        let start = Instant::now();
        let mut checked = start;
        loop {
            self.reap_slots(open)?;
            if ready(self, open) {
                return Ok(());
            }
            if start.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            std::thread::sleep(Duration::from_micros(20));
            if checked.elapsed() > CHECK {
                checked = Instant::now();
                self.ask(Some(open))?;
                // What this waits for may be behind what only another queue runs.
                if let Some(siblings) = &self.options.siblings {
                    siblings.check()?;
                }
            }
        }
    }

    /// Whether the device works and moves on, with what is being submitted if anything is. Inside the
    /// scope.
    pub(super) fn ask(&mut self, open: Option<&mut Open<D>>) -> Result<()> {
        // Another queue may have found out, and then no gate behind it ever opens.
        self.loss.check()?;
        self.reap();
        let device = Arc::clone(&self.device);
        let driver = &device.driver;
        // The slots of what is being submitted, of which some launches run.
        let partly_runs = match open {
            Some(Open { gate: Some(gate), .. }) => !gate.slots.is_empty() && gate.look(driver)?,
            Some(open) => open.slots > 0,
            None => false,
        };
        let mut running = self.in_flight.front().map(|front| front.ticket);
        for gated in &mut self.gated {
            if let Some(gate) = &mut gated.gate
                && gate.look(driver)?
            {
                running = running.or(Some(gated.ticket));
            }
        }
        // One that runs is enough: a device that is lost says so of any.
        match running.map_or(Ok(None), |running| self.end_of(running)) {
            Ok(Some(end)) => {
                driver.fired(end)?;
            }
            Err(error @ Error::Lost { .. }) => return Err(error),
            // No event to be had now says nothing about the device.
            Ok(None) | Err(_) => {}
        }
        if running.is_none() && !partly_runs {
            self.still_since = None;
            return Ok(());
        }
        let now = Instant::now();
        if std::mem::take(&mut self.moved_on) {
            self.still_since = None;
        }
        let waited = now.duration_since(*self.still_since.get_or_insert(now));
        if waited < self.options.stall_timeout {
            return Ok(());
        }
        Err(Error::Stalled { device: driver.info().to_string(), waited })
    }

    /// Nobody knows any more when what runs ends. Returns what the device is lost for.
    pub(super) fn lose(&mut self, error: &Error) -> Error {
        if !self.loss.is_lost() {
            let in_flight = self.in_flight.len() + self.gated.len();
            tracing::error!(%error, in_flight, "device lost; its unfinished work will never count as complete");
        }
        self.loss.lose(self.device.driver.info(), error)
    }
}
