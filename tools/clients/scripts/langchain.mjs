import { readFileSync } from 'node:fs';
// set-up
import { ChatAnthropic } from '@langchain/anthropic';
import { ChatOpenAI } from '@langchain/openai';
import { createAgent, tool } from 'langchain';
import { z } from 'zod';

const { BASE_URL, API_KEY: apiKey, MODEL: model } = process.env;
const configuration = { baseURL: `${BASE_URL}/v1` };
const models = {
  chat: () => new ChatOpenAI({ model, apiKey, configuration, maxRetries: 0, useResponsesApi: false }),
  responses: () => new ChatOpenAI({ model, apiKey, configuration, maxRetries: 0, useResponsesApi: true }),
  anthropic: () => new ChatAnthropic({ model, apiKey, anthropicApiUrl: BASE_URL, maxRetries: 0, maxTokens: 1000 }),
};
// end

const cancel = process.argv[2] === 'cancel';
const stop = new AbortController();
const read = tool(({ path }) => readFileSync(path, 'utf8'), {
  name: 'read_file',
  description: 'Reads a file.',
  schema: z.object({ path: z.string() }),
});
const agent = createAgent({ model: models[process.env.DIALECT](), tools: [read] });
const messages = [{ role: 'user', content: process.env.PROMPT }];
let deltas = 0;
try {
  for await (const [message] of await agent.stream({ messages }, { streamMode: 'messages', signal: stop.signal })) {
    if (message.getType() !== 'ai') continue;
    process.stdout.write(message.text);
    if (cancel && ++deltas === 5) stop.abort();
  }
} catch (error) {
  if (!stop.signal.aborted) throw error;
}
