import { readFileSync } from 'node:fs';
// set-up
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const { BASE_URL, API_KEY: apiKey, MODEL } = process.env;
const models = {
  chat: () => createOpenAICompatible({ name: 'local', baseURL: `${BASE_URL}/v1`, apiKey, includeUsage: true })(MODEL),
  responses: () => createOpenAI({ baseURL: `${BASE_URL}/v1`, apiKey })(MODEL),
  anthropic: () => createAnthropic({ baseURL: `${BASE_URL}/v1`, apiKey })(MODEL),
};
// end

const cancel = process.argv[2] === 'cancel';
const text = { type: 'text', text: process.env.PROMPT };
const picture = () => ({ type: 'file', mediaType: 'image/png', data: readFileSync('picture.png') });
const content = process.argv[2] === 'picture' ? [picture(), text] : [text];
const stop = new AbortController();
const result = streamText({
  model: models[process.env.DIALECT](),
  messages: [{ role: 'user', content }],
  tools: {
    read_file: tool({
      description: 'Reads a file.',
      inputSchema: z.object({ path: z.string() }),
      execute: ({ path }) => readFileSync(path, 'utf8'),
    }),
  },
  stopWhen: stepCountIs(5),
  abortSignal: stop.signal,
  maxRetries: 0,
  onError: ({ error }) => {
    console.error(error);
    process.exitCode = 1;
  },
});
let deltas = 0;
for await (const delta of result.textStream) {
  process.stdout.write(delta);
  if (cancel && ++deltas === 5) stop.abort();
}
