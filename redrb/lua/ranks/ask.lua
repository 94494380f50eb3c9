-- A rank asks for its next batch, and may decide it: rank 0 by the parts of all ranks or an error, another
-- rank by an error, as its time is up. The first decision stands for all ranks, and wakes them.
-- KEYS[1] stream
-- ARGV    the call `AskStep` of redrb/stream/ranks/calls.py
-- Returns its reply. Repeated, it decides nothing more.
--
-- The hash ranks:<group> holds the consumer of each rank by its number, and in `former` that of the last
-- rank 0. The hash rank_steps:<group> holds
--   <number>           a decision, until all ranks have read the one after it
--   unread:<number>    how many ranks have not read it
--   next               the number of the next decision; numbers only grow
--   base               what it was when ranks began anew: a rank that asks for less has no reply since
--   got:<rank>         the number of the decision that a rank asks for
--   met                how many ranks there were when all had asked since they began anew
--   due                "<number> <time>": when the first rank that waits gives up
--@include task clock permissions ranks

local KEPT_MS = 86400000 -- since the last call
check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local rank, world, asked, consumer = ask.rank, ask.world_size, ask.number, ask.consumer
local ranks, steps = key('ranks', ask.group), key('rank_steps', ask.group)
local first, holder, former = unpack(redis.call('HMGET', ranks, '0', rank, 'former'))
local met, at_due, following, base, got = unpack(redis.call('HMGET', steps, 'met', 'due', 'next', 'base',
  'got:' .. rank))
following, base, got = tonumber(following or 0), tonumber(base or 0), tonumber(got)
local lead, missing = first or former, {}
-- a number above all known ones: Redis has lost keys
local starts = holder ~= consumer or asked > following or rank == 0 and met and tonumber(met) ~= world
local known = not starts and asked >= base -- if neither, the reply to its start was lost
if holder and holder ~= consumer and asked >= 0 then
  return cmsgpack.pack({replaced = true})
end
if ask.decision and redis.call('HGET', steps, asked) == ask.decision then -- its reply was lost
  return cmsgpack.pack({number = asked, decision = ask.decision})
end

local before = (starts or known) and asked >= 0 and got or asked -- what it asked for last
if asked < before then -- it reads this one again: the reply with its groups was lost
  redis.call('HINCRBY', steps, 'unread:' .. asked, 1)
elseif asked > before then -- it has read the one before
  local unread = redis.call('HINCRBY', steps, 'unread:' .. asked - 1, -1)
  if unread <= 0 then
    redis.call('HDEL', steps, asked - 2, 'unread:' .. asked - 1)
  end
  if unread <= 1 and rank > 0 and lead then -- rank 0 may wait for that
    wake_rank(lead .. '.read')
  end
end
if starts then
  if rank > 0 and lead then -- rank 0 may wait for this one
    wake_rank(lead .. '.rank')
    wake_rank(lead .. '.read')
  end
  if rank == 0 or met or holder or asked > following then -- decisions so far are for others
    wake_ranks(ask.group)
    met, at_due, base = nil, nil, math.max(following, asked)
    redis.call('UNLINK', ranks)
    redis.call('HDEL', steps, 'met', 'due')
    if rank == 0 and lead ~= consumer then -- nor does anybody end them
      redis.call('UNLINK', steps)
    end
    redis.call('HSET', steps, 'base', base, 'next', base)
    if lead then
      redis.call('HSET', ranks, 'former', lead)
      former = lead
    end
  end
  redis.call('HSET', ranks, rank, consumer)
end
local place = known and asked or base
local decided = redis.call('HGET', steps, place)
if tonumber(met) ~= world then
  local all = {}
  for other = 0, world - 1 do -- bound: ranks
    all[other + 1] = other
  end
  for other, there in ipairs(replies_of('HMGET', ranks, all)) do
    missing[#missing + 1] = not there and other - 1 or nil
  end
  if rank == 0 and #missing == 0 then
    redis.call('HSET', steps, 'met', world)
  end
end
redis.call('HSET', steps, 'got:' .. rank, place)
if ask.decision and known and not decided then
  decided = ask.decision
  redis.call('HSET', steps, place, decided, 'next', place + 1, 'unread:' .. place, world)
  wake_ranks(ask.group)
end
local at, due = string.match(at_due or '', '^(%d+) (%d+)$')
local left_ms = tonumber(at) == place and math.max(0, due - now_ms()) or nil
if ask.left_ms and not decided and (left_ms or math.huge) > ask.left_ms then
  redis.call('HSET', steps, 'due', string.format('%.0f %.0f', place, now_ms() + ask.left_ms))
  if lead and not left_ms then -- rank 0 may be taking already
    wake_rank(lead .. '.rank')
  end
end
redis.call('PEXPIRE', ranks, KEPT_MS)
redis.call('PEXPIRE', steps, KEPT_MS)
return cmsgpack.pack({number = place, decision = decided or nil, missing = missing, left_ms = left_ms,
  former = rank == 0 and former ~= consumer and former or nil})
