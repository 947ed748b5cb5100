// The state of the server: its model, or why it does not answer; asked again until the model is ready.
import { useEffect, useState } from 'preact/hooks';
import { ApiFailure, readCapabilities } from './api';
import { usePolling } from './poll';
import type { Capabilities } from './types';

export interface Server {
  model: Capabilities | null;
  names: string[];
  state: 'connecting' | 'ready' | 'loading' | 'unreachable' | 'locked';
  text: string;
}

export function useServer(attempt: number): Server {
  const [model, setModel] = useState<Capabilities | null>(null);
  const [names, setNames] = useState<string[]>([]);
  const [failure, setFailure] = useState<ApiFailure | null>(null);
  const waiting = !model || failure !== null;
  usePolling(waiting, attempt, async () => {
    try {
      const read = await readCapabilities();
      setModel(read.model);
      setNames(read.names);
      setFailure(null);
      return { value: true, busy: false };
    } catch (error) {
      const known = error instanceof ApiFailure ? error : new ApiFailure(0, String(error));
      setFailure(known);
      throw error;
    }
  });
  // A failed answer may mean that the server is gone.
  useEffect(() => {
    if (!attempt) return;
    readCapabilities().catch((error: unknown) =>
      setFailure(error instanceof ApiFailure ? error : new ApiFailure(0, String(error))),
    );
  }, [attempt]);
  if (!failure)
    return {
      model,
      names,
      state: model ? 'ready' : 'connecting',
      text: model ? `${model.id}, ${model.context.toLocaleString('en')} tokens` : 'connecting',
    };
  if (failure.status === 401) return { model, names, state: 'locked', text: 'needs an API key' };
  if (failure.code === 'model_loading') return { model, names, state: 'loading', text: `loading: ${failure.phase}` };
  return { model, names, state: 'unreachable', text: failure.status ? failure.message : 'no connection' };
}
