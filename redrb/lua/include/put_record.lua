-- The record of puts: the counters of the hash puts, and what is refused where they are unusable.
--@include task

-- A counter of the hash puts as a number, or nil if it is lost or damaged.
local function counter(text)
  local found = tonumber(text or '')
  return found and found >= 0 and found < 2 ^ 53 and found % 1 == 0 and found or nil
end

-- Refuse a task whose record of puts is unusable: entries beyond the last id that it counts would be removed
-- as those of failed puts. Nothing is guessed here.
local function refuse_puts(why)
  error('the key ' .. puts .. ' ' .. why .. ', so nobody knows which entries are groups; nothing was '
    .. 'changed: run `redrb doctor TASK --repair`, which rebuilds it', 0)
end

-- The last id that the task counts.
local function last_counted()
  local last = redis.call('HGET', puts, 'last')
  if not last and not exists() then
    return 0
  end
  return counter(last) or refuse_puts(last and 'is damaged' or 'is lost')
end
