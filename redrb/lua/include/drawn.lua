-- What a draw leaves behind: weights of the drawn groups, and the pool's clock at the last of their places.
--@include task facts pools

-- Move a pool's clock to the last of the drawn places, if only `taken` groups lie up to there, and some that
-- a query has passed over: these get new places. A query that draws for itself moves no clock.
local function move_clock(group, pool, clock, taken, passed)
  local before = {}
  for i, at in ipairs(replies_of('ZMSCORE', key('ready', pool), passed)) do
    if at and tonumber(at) <= clock then
      before[#before + 1] = passed[i]
    end
  end
  local near = redis.call('ZCOUNT', key('ready', pool), '-inf', string.format('%.17g', clock))
  if clock == math.huge or near ~= taken + #before then
    return
  end
  redis.call('HSET', key('clock', group), pool, string.format('%.17g', clock))
  local places = {}
  for i, facts in ipairs(facts_of_all(before)) do
    if facts then -- else another client deleted the entry
      places[#places + 1], places[#places + 2] = place(facts, before[i], clock), before[i]
    end
  end
  in_parts('ZADD', key('ready', pool), places)
end

-- Note groups that are being drawn: their weights for the reply, and how far the clock moves; a query has
-- `passed` groups over.
local function note_drawn(group, pool, found, all, weights, passed)
  for _, facts in ipairs(all) do
    weights[#weights + 1] = facts and string.format('%.17g', facts.score) or '0'
  end
  local clock = 0
  for _, at in ipairs(redis.call('ZMSCORE', key('ready', pool), unpack(found))) do
    clock = math.max(clock, tonumber(at or '0'))
  end
  move_clock(group, pool, clock, #found, passed or {})
end
