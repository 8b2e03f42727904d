//! The predicted and the real memory of a run: on the host and on the device that computes.

use memory_policy::{Bytes, MemorySnapshot, MemorySpace, Name, Probe};
use planner::Plan;
use serde_json::{Value, json};

use super::Session;
use crate::failure::Outcome;
use crate::machine::device;

/// The highest peaks that plans of this process have predicted so far. They never fall, because the peaks of the system and of a device
/// never fall.
#[derive(Debug)]
pub(super) struct Prediction {
    predicted: Bytes,
    predicted_on_device: Bytes,
    /// Places for which an excess was reported.
    said: Vec<MemorySpace>,
}

/// A peak that is more than this share above its prediction causes a warning, in percent.
const MAX_EXCESS_PERCENT: u64 = 5;

/// A peak that is too far above its prediction.
#[derive(Debug, PartialEq, Eq)]
struct Exceeded {
    place: MemorySpace,
    peak: Bytes,
}

impl Prediction {
    pub fn new(plan: &Plan) -> Self {
        let mut prediction = Self { predicted: Bytes::ZERO, predicted_on_device: Bytes::ZERO, said: Vec::new() };
        prediction.follow(plan);
        prediction
    }

    /// Includes another plan, which is followed from here on.
    pub fn follow(&mut self, plan: &Plan) {
        self.predicted = self.predicted.max(plan.predicted_peak);
        self.predicted_on_device = self.predicted_on_device.max(plan.predicted_device_peak);
    }

    /// A place whose peak exceeds the predictions of every plan so far; each place once.
    fn exceeded(&mut self, now: &MemorySnapshot) -> Option<Exceeded> {
        let on_device = now.device.as_ref().map_or(Bytes::ZERO, |device| device.peak);
        let peaks = [
            (MemorySpace::Host, now.peak_rss, self.predicted),
            (MemorySpace::Device, on_device, self.predicted_on_device),
        ];
        let is_beyond = |(place, peak, predicted): &(MemorySpace, Bytes, Bytes)| {
            *peak > predicted.percent(100 + MAX_EXCESS_PERCENT) && !self.said.contains(place)
        };
        let (place, peak, _) = peaks.into_iter().find(is_beyond)?;
        self.said.push(place);
        Some(Exceeded { place, peak })
    }
}

impl Session {
    /// Compares the prediction with the system's peak and with the device's, after a step or another phase of the run. The first time that a
    /// peak is more than 5 % above the prediction, a warning names the row that was most likely wrong.
    pub fn check_prediction(&mut self, phase: &Name) -> Outcome<()> {
        let now = self.probe.snapshot()?;
        while let Some(exceeded) = self.prediction.exceeded(&now) {
            let (text, mut event) = match exceeded.place {
                MemorySpace::Host => self.beyond_on_host(phase, exceeded.peak),
                MemorySpace::Device => self.beyond_on_device(phase, exceeded.peak),
            };
            event["step"] = json!(self.trainer.step_count());
            event["phase"] = json!(phase.as_str());
            self.warn(&text, event)?;
        }
        Ok(())
    }

    fn beyond_on_host(&self, phase: &Name, peak: Bytes) -> (String, Value) {
        let (predicted, tensors) = (self.plan.predicted_peak, Bytes(heap::held().peak_live as u64));
        let row = planner::wrong_row(&self.plan, phase, peak, tensors);
        let text = format!(
            "the peak is {peak} after {phase}, above the predicted {predicted}; the likely cause is the row {row} (tensors used {tensors})"
        );
        let event = json!({"kind": "prediction", "row": row, "peak_rss_bytes": peak.0,
            "predicted_peak_bytes": predicted.0, "tensor_bytes": tensors.0});
        (text, event)
    }

    fn beyond_on_device(&self, phase: &Name, peak: Bytes) -> (String, Value) {
        let predicted = self.plan.predicted_device_peak;
        let text = format!("the device's peak is {peak} after {phase}, above the predicted {predicted}");
        let event = json!({"kind": "device_prediction", "device_peak_bytes": peak.0,
            "predicted_device_peak_bytes": predicted.0});
        (text, event)
    }

    /// Adds the device's bytes to an event, if a device computes.
    pub(super) fn add_device(&self, now: &MemorySnapshot, event: &mut Value) {
        add_device(now, self.plan.predicted_device_peak, event);
    }
}

fn add_device(now: &MemorySnapshot, predicted: Bytes, event: &mut Value) {
    let Some(device) = &now.device else { return };
    event["device_bytes"] = json!(device.used.0);
    event["device_available_bytes"] = json!(device.ceiling().0);
    device::add_peaks(now, predicted, event);
}

#[cfg(test)]
mod tests {
    use memory_policy::{DeviceMemory, ScriptedProbe};

    use super::*;

    /// A probe that plays back peaks of the process and of a device, in MiB.
    fn probe(peaks: &[(u64, u64)]) -> ScriptedProbe {
        let snapshot = |&(process, device): &(u64, u64)| MemorySnapshot {
            peak_rss: Bytes::mib(process),
            device: Some(DeviceMemory {
                used: Bytes::mib(device),
                peak: Bytes::mib(device),
                free: Bytes::mib(100),
                ..DeviceMemory::default()
            }),
            ..MemorySnapshot::default()
        };
        ScriptedProbe::new(peaks.iter().map(snapshot).collect())
    }

    #[test]
    fn a_peak_on_a_device_beyond_its_prediction_is_said_once_and_so_is_one_on_the_host() {
        let (predicted, predicted_on_device) = (Bytes::mib(50), Bytes::mib(1000));
        let mut prediction = Prediction { predicted, predicted_on_device, said: Vec::new() };
        // 52.5 and 1,050 MiB are the limits.
        let probe = probe(&[(40, 900), (52, 1050), (52, 1051), (50, 1200), (60, 1300), (70, 1400)]);
        let mut look = || prediction.exceeded(&probe.snapshot().expect("scripted"));
        assert_eq!([look(), look()], [None, None]);
        assert_eq!(look(), Some(Exceeded { place: MemorySpace::Device, peak: Bytes::mib(1051) }));
        assert_eq!(look(), None);
        assert_eq!(look(), Some(Exceeded { place: MemorySpace::Host, peak: Bytes::mib(60) }));
        assert_eq!(look(), None);
    }

    #[test]
    fn an_event_has_the_bytes_of_a_device_where_one_computes() {
        let mut event = json!({"step": 1});
        add_device(&MemorySnapshot::default(), Bytes::ZERO, &mut event);
        assert_eq!(event, json!({"step": 1}));
        add_device(&probe(&[(1, 7)]).snapshot().expect("scripted"), Bytes::mib(9), &mut event);
        let expected = json!({"step": 1, "device_bytes": 7 << 20, "device_peak_bytes": 7 << 20,
            "device_available_bytes": 107 << 20, "predicted_device_peak_bytes": 9 << 20});
        assert_eq!(event, expected);
    }
}
