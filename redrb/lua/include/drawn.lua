-- Random orders, after a draw: the weights of the drawn groups, and where the next draw begins.
--@include task facts pools

-- Move a pool's clock, and give new places to groups that lie before it.
local function set_draw_clock(group, pool, clock, before)
  local all, places = facts_of_all(before), {}
  --@include places
  if restart_if_crowded(all, clock) then
    return
  end
  redis.call('HSET', key('clock', group), pool, string.format('%.17g', clock))
  for i, facts in ipairs(all) do
    if facts then -- else another client deleted the entry
      places[#places + 1], places[#places + 2] = place(facts, before[i], clock), before[i]
    end
  end
  in_parts('ZADD', key('ready', pool), places)
end

-- The last of the places of some members, and those of them that lie up to `bound`.
local function places_of(pool, members, bound)
  local last, before = 0, {}
  for i, at in ipairs(replies_of('ZMSCORE', key('ready', pool), members)) do
    at = tonumber(at or '0')
    last = math.max(last, at)
    if at <= bound then
      before[#before + 1] = members[i]
    end
  end
  return last, before
end

-- Move the clock behind groups that have the first places, of which none is drawn.
local function pass_over(group, pool, members)
  local last = places_of(pool, members, 0)
  if last < math.huge then
    set_draw_clock(group, pool, last, members)
  end
end

-- Note groups that are being drawn: their weights for the reply, and the last of their places as the clock,
-- if only they lie up to there, and some that a query has passed over.
local function note_drawn(group, pool, found, all, weights, passed)
  for _, facts in ipairs(all) do
    weights[#weights + 1] = facts and string.format('%.17g', facts.score) or '0'
  end
  local clock = places_of(pool, found, 0)
  local _, before = places_of(pool, passed, clock)
  local near = redis.call('ZCOUNT', key('ready', pool), '-inf', string.format('%.17g', clock))
  if clock < math.huge and near == #found + #before then
    set_draw_clock(group, pool, clock, before)
  end
end
