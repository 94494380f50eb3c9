-- Rank 0 is about to end a batch: which ranks have not read it yet? They wake rank 0 when they have.
-- KEYS[1] stream
-- ARGV    the call `AskRead` of redrb/stream/ranks/calls.py
-- Returns its reply, the ranks; none if ranks have started again since
--@include task

begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local steps, all, missing = key('rank_steps', ask.group), {}, {}
if redis.call('HGET', key('ranks', ask.group), '0') == ask.consumer then
  for other = 1, ask.world_size - 1 do -- bound: ranks, 4,096 at most (MOST_RANKS)
    all[other] = 'got:' .. other
  end
  for other, got in ipairs(replies_of('HMGET', steps, all)) do
    missing[#missing + 1] = got and tonumber(got) <= ask.number and other or nil
  end
end
if #missing > 0 then
  redis.call('HSET', steps, 'awaited', 1)
elseif redis.call('HEXISTS', steps, 'awaited') == 1 then
  redis.call('HDEL', steps, 'awaited')
end
return cmsgpack.pack(missing)
