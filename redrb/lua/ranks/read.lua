-- Rank 0 is about to end a batch: which ranks have not read it yet? They wake rank 0 when they have.
-- KEYS[1] stream
-- ARGV    the call `AskRead` of redrb/stream/ranks/calls.py
-- Returns its reply
--@include task

local ask = cmsgpack.unpack(ARGV[1])
local steps, all, missing, reading = key('rank_steps', ask.group), {}, {}, 0
local unread = tonumber(redis.call('HGET', steps, 'unread:' .. ask.number) or 0)
for other = 0, unread > 0 and ask.world_size - 1 or -1 do -- bound: ranks, 4,096 at most (MOST_RANKS)
  all[other + 1] = 'got:' .. other
end
for other, got in ipairs(replies_of('HMGET', steps, all)) do
  if got and tonumber(got) <= ask.number then
    reading = reading + 1
    missing[#missing + 1] = other > 1 and other - 1 or nil
  end
end
return cmsgpack.pack({missing = missing, skipped = unread > reading})
