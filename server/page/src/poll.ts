// Polls while the tab is visible: quickly while something happens, else with exponential back-off.
import { useEffect, useRef, useState } from 'preact/hooks';

const FASTEST_MS = 250;
const SLOWEST_MS = 15_000;

export interface Polled<Value> {
  value: Value | null;
  failed: boolean;
}

// `read` gives a value and whether it calls for the next one at once. A change of `wake` starts over with the shortest wait.
export function usePolling<Value>(
  enabled: boolean,
  wake: unknown,
  read: (signal: AbortSignal) => Promise<{ value: Value; busy: boolean }>,
): Polled<Value> {
  const [state, setState] = useState<Polled<Value>>({ value: null, failed: false });
  const reader = useRef(read);
  reader.current = read;
  const wait = useRef(FASTEST_MS);
  useEffect(() => {
    if (!enabled) return;
    const control = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    wait.current = FASTEST_MS;
    const step = async () => {
      timer = undefined;
      if (document.hidden) return;
      try {
        const { value, busy } = await reader.current(control.signal);
        if (control.signal.aborted) return;
        setState({ value, failed: false });
        wait.current = busy ? FASTEST_MS : Math.min(wait.current * 2, SLOWEST_MS);
      } catch {
        if (control.signal.aborted) return;
        setState((before) => ({ ...before, failed: true }));
        wait.current = Math.min(wait.current * 2, SLOWEST_MS);
      }
      timer = setTimeout(step, wait.current);
    };
    const resume = () => {
      if (document.hidden) return;
      wait.current = FASTEST_MS;
      clearTimeout(timer);
      timer = setTimeout(step, 0);
    };
    document.addEventListener('visibilitychange', resume);
    void step();
    return () => {
      control.abort();
      clearTimeout(timer);
      document.removeEventListener('visibilitychange', resume);
    };
  }, [enabled, wake]);
  return state;
}
