-- Rank 0 is about to end a batch: which ranks have not read it yet? They wake rank 0 when they have.
-- KEYS[1] stream
-- ARGV    the call `AskRead` of redrb/stream/ranks/calls.py
-- Returns its reply
--@include task

begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local ranks, steps, all, missing = key('ranks', ask.group), key('rank_steps', ask.group), {}, {}
local first, former = unpack(redis.call('HMGET', ranks, '0', 'former'))
local unread = (first or former) == ask.consumer and redis.call('HGET', steps, 'unread:' .. ask.number)
if not unread then -- all have, or another process is rank 0
  return cmsgpack.pack({skipped = false})
end
for other = 0, ask.world_size - 1 do -- bound: ranks, 4,096 at most (MOST_RANKS)
  all[other + 1] = 'got:' .. other
end
local waits = 0
for other, got in ipairs(replies_of('HMGET', steps, all)) do
  if got and tonumber(got) <= ask.number then
    waits = waits + 1
    missing[#missing + 1] = other > 1 and other - 1 or nil
  end
end
if #missing > 0 then
  redis.call('HSET', steps, 'awaited', 1)
elseif redis.call('HEXISTS', steps, 'awaited') == 1 then
  redis.call('HDEL', steps, 'awaited')
end
return cmsgpack.pack({missing = missing, skipped = tonumber(unread) > waits})
